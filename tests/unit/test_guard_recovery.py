"""What the guard leaves alone: a run that would have succeeded goes on, and one that cannot ends with a true word."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tessera
from tessera.config.reader import parse_overrides
from tessera.config.run_config import GuardSection, load_config
from tessera.core.callback import Callback
from tessera.observe.anomaly.attribution import GuardStop
from tessera.observe.anomaly.guard import Guard
from tessera.observe.report.history import read_sessions
from tests.toys.chat_set import write_chat_set
from tests.unit.test_guard_runs import BAD, STEPS, events, held_out, recipe, train_steps


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_set(tmp_path_factory.mktemp("chat"), samples=220)


class Shake(Callback):
    """Before a step, weights move to where every loss is far higher: what one unlucky update does."""

    def __init__(self, step: int = BAD, times: int = 1) -> None:
        self.step, self.times = step, times

    @torch.no_grad()
    def on_step_begin(self, trainer: Any) -> None:
        if trainer.step + 1 == self.step and self.times:
            self.times -= 1
            noise = torch.Generator().manual_seed(0)
            for parameter in trainer.module.parameters():
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=noise))


def actions(run: tessera.Run) -> list[str]:
    return [event["action"] for event in events(run.folder)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "expected"), [("skip", ["skipped"] * 2 + ["clipped"]), ("clip", ["clipped"] * 3)], ids=["skip", "clip"]
)
def test_a_loss_that_rose_and_stays_does_not_starve_the_run(
    data: Path, tmp_path: Path, policy: str, expected: list[str]
) -> None:
    run = tessera.train(recipe(data, tmp_path, policy=policy, grad_spike=None), callbacks=[Shake()])
    assert train_steps(run) == list(range(1, STEPS + 1))
    assert actions(run)[:3] == expected
    assert [event["step"] for event in events(run.folder)][:3] == [BAD, BAD + 1, BAD + 2]
    assert "level from now on" in events(run.folder)[2]["note"]
    assert "skipped" not in actions(run)[3:]
    losses = [row["loss"] for row in run.metrics if row["kind"] == "train"]
    assert losses[-1] < 0.9 * losses[BAD]  # it learns again


@pytest.mark.slow
def test_too_high_a_learning_rate_is_told_as_that(data: Path, tmp_path: Path) -> None:
    """No sample is blamed, and nothing goes round in circles. On some machines more than half of the steps are not
    finite, and 50 that are have to be too high."""
    settings = recipe(data, tmp_path) | {"optim": {"lr": 3.0, "schedule": {"kind": "constant"}}}
    said = ""
    try:
        tessera.train(settings, {"train.steps": 250, "train.global_batch": 2})
    except GuardStop as stop:
        said = str(stop.fix)
    rows = events(tmp_path / "chat")
    told = [event for event in rows if event["kind"] == "diverged"]
    assert said or told
    assert "optim.lr" in (said or told[0]["note"])
    assert all(event["samples"] == [] for event in rows)
    assert not any(event["action"] == "went back" for event in rows)


@pytest.mark.slow
def test_a_spike_is_clipped_and_told_and_its_samples_are_named_on_request(data: Path, tmp_path: Path) -> None:
    faults = {"absurd_labels": ["sample-7", "sample-8"]}
    run = tessera.train(recipe(data, tmp_path / "a", faults))
    (event, *_) = events(run.folder)
    assert (event["kind"], event["action"], event["samples"], event["module"]) == ("loss spike", "clipped", [], None)
    assert not any(row.get("skipped") for row in run.metrics)
    named = tessera.train(recipe(data, tmp_path / "b", faults, blame="always"))
    assert {name for event in events(named.folder) for name in event["samples"]} <= {"sample-7", "sample-8"}
    assert events(named.folder)[0]["samples"]
    assert held_out(named) == held_out(run)  # looking for the cause changes nothing


@pytest.mark.slow
def test_a_resume_after_a_stop_does_not_stop_at_the_same_step(data: Path, tmp_path: Path) -> None:
    """Also where a checkpoint of the step before was written before the guard knew of it. Which step has the bad sample
    is the packing's affair: the first run tells."""
    step = stopped_and_resumed(data, tmp_path / "a", every=10)
    assert step > 1
    assert stopped_and_resumed(data, tmp_path / "b", every=step - 1) == step


def stopped_and_resumed(data: Path, out: Path, every: int) -> int:
    """The step at which the guard stopped; the resumed run has passed it."""
    settings = recipe(data, out, {"absurd_labels": ["sample-7"]}, policy="stop")
    settings["checkpoint"] = {"every": every}
    with pytest.raises(GuardStop) as caught:
        tessera.train(settings)
    folder = out / "chat"
    (stop,) = events(folder)
    assert stop["samples"] == ["sample-7"]
    assert "tessera resume" in str(caught.value.fix)
    with contextlib.suppress(GuardStop):  # at a later step: the sample comes again in the next pass
        tessera.resume(folder)
    after = events(folder)[1:]
    assert (after[0]["step"], after[0]["action"]) == (stop["step"], "clipped")
    assert all(event["step"] > stop["step"] for event in after[1:])
    step: int = stop["step"]
    return step


@pytest.mark.slow
def test_nan_in_every_sample_is_not_blamed_on_one(data: Path, tmp_path: Path) -> None:
    lines = (data / "train.jsonl").read_text().splitlines()
    pictured = [line for number, line in enumerate(lines) if number % 3]
    (data / "pictured.jsonl").write_text("\n".join(pictured) + "\n")
    settings = recipe(data, tmp_path, {"nan_pixels": [json.loads(line)["id"] for line in pictured]}, limit=2)
    settings["data"]["train"] = [{"path": str(data / "pictured.jsonl")}]
    with pytest.raises(GuardStop, match="3 steps in a row") as caught:
        tessera.train(settings)
    assert "every sample of the step" in caught.value.what
    assert "optim.lr" in str(caught.value.fix)
    assert all(event["samples"] == [] and event["every_sample"] for event in events(tmp_path / "chat"))


@pytest.mark.slow
def test_a_run_whose_every_step_was_skipped_ends_as_failed(data: Path, tmp_path: Path) -> None:
    lines = (data / "train.jsonl").read_text().splitlines()
    pictured = [line for number, line in enumerate(lines) if number % 3]
    (data / "damaged.jsonl").write_text("\n".join(pictured) + "\n")
    names = [json.loads(line)["id"] for line in pictured]
    settings = recipe(data, tmp_path, {"nan_pixels": names})
    settings["data"]["train"] = [{"path": str(data / "damaged.jsonl")}]
    settings["train"]["steps"] = 3
    with pytest.raises(GuardStop, match="nothing was trained") as caught:
        tessera.train(settings)
    assert caught.value.exit_code == 3
    assert "guard.jsonl" in str(caught.value.where)
    assert read_sessions(tmp_path / "chat")[-1].how == "failed"
    assert not list((tmp_path / "chat").glob("checkpoints/step-*"))


@pytest.mark.parametrize("applied", [[True, False], [False, True], [False, False]])
def test_one_applied_update_of_all_is_enough(applied: list[bool]) -> None:
    """Whatever was skipped before or after it, and over a resume."""
    guard = Guard(GuardSection())
    trainer: Any = SimpleNamespace(step=2, stop_reason=None, config=SimpleNamespace(folder=Path("run")))
    for outcome in applied:
        guard.on_step_end(trainer, SimpleNamespace(applied=outcome))  # type: ignore[arg-type]
        state = guard.state_dict()
        guard = Guard(GuardSection())
        guard.load_state_dict(state)
    guard._not_finite = 1  # the last step was not finite
    with contextlib.nullcontext() if any(applied) else pytest.raises(GuardStop):
        guard.check_trained(trainer)


def test_weights_that_were_never_finite_are_told_at_once(data: Path, tmp_path: Path) -> None:
    every = [f"sample-{number}" for number in range(220)]
    tessera.train(recipe(data, tmp_path, {"nan_pixels": every}, policy="off"), {"train.steps": 2})
    with pytest.raises(GuardStop, match="parameter ") as caught:
        tessera.resume(tmp_path / "chat", {"guard.policy": "clip", "train.steps": 6})
    assert "not finite when the run began" in str(caught.value.fix)
    assert len(events(tmp_path / "chat")) == 1


@pytest.mark.parametrize("policy", ["clip", "skip", "rollback", "stop", "off"])
def test_every_policy_can_be_said_in_a_shell_and_in_a_file(tmp_path: Path, policy: str) -> None:
    path = tmp_path / "recipe.yaml"
    needed = "model: {family: qwen2, preset: quickstart}\ntrain: {steps: 1}\n"
    path.write_text(f"{needed}guard: {{policy: {policy}, coverage: off}}\n")
    assert load_config(path).guard.policy == policy
    assert load_config(path).guard.coverage == "off"
    plain = {"model": {"family": "qwen2", "preset": "quickstart"}, "train": {"steps": 1}}
    assert load_config(plain, parse_overrides([f"guard.policy={policy}"])).guard.policy == policy
