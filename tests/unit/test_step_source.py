"""The trainer takes the micro-batches of a step from any `StepSource`: a list, or a rollout of the trained model."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tessera
from tessera.core.batch import Batch
from tessera.core.callback import Callback
from tessera.core.step_source import StepSource
from tessera.models.text.costs import example_batch
from tessera.training.steps import DataWait
from tests.errors import raises
from tests.toys.callbacks import StopAt
from tests.toys.step_sources import ListSteps, Policy, PolicyGradient, Rollout
from tests.unit.test_given_objects import Points, Regression, net


def recipe(out: Path, steps: int = 40, **more: Any) -> dict[str, Any]:
    return {
        "name": "source",
        "out": str(out),
        "model": {"family": "module"},
        "train": {"steps": steps, "global_batch": 32, "micro_batch": 16, "device": "cpu"},
        "optim": {"lr": 0.05, "schedule": {"kind": "constant"}},
        "checkpoint": {"every": 10, "export": False},
        **more,
    }


def policy() -> Policy:
    torch.manual_seed(1)
    return Policy()


def weights(run: tessera.Run) -> dict[str, torch.Tensor]:
    assert run.checkpoint is not None
    shards = [load_file(path) for path in sorted(run.checkpoint.glob("*.safetensors"))]
    return {name: tensor for shard in shards for name, tensor in shard.items()}


def losses(run: tessera.Run) -> list[float]:
    return [row["loss"] for row in run.metrics if row["kind"] == "train"]


def test_a_list_of_batches_trains(tmp_path: Path) -> None:
    points = Points(16).x
    batches = [Batch({"x": part}, sample_ids=tuple("abcdefgh")) for part in points.split(8)]
    run = tessera.train(recipe(tmp_path), model=net(), task=Regression(), dataset=ListSteps(batches))
    assert losses(run)[-1] < 0.5 * losses(run)[0]
    assert (run.folder / "ledger" / "rank-00000.jsonl").read_text().count("\n") == 40


def test_ready_tokens_need_no_tokenizer(tmp_path: Path) -> None:
    batch = example_batch(16)
    settings = recipe(tmp_path, 1, model={"family": "qwen3", "preset": "quickstart"})
    run = tessera.train(settings, {"train.global_batch": 1, "train.micro_batch": 1}, dataset=ListSteps([batch]))
    assert len(losses(run)) == 1
    settings["data"] = {"options": {"eval": "held_out"}}
    with raises("tokenizer.not-named"):
        tessera.train(settings, overwrite=True, dataset=ListSteps([batch]))


def test_a_rollout_trains_on_what_the_model_generates_and_resumes_bitwise(tmp_path: Path) -> None:
    source = Rollout()
    complete = tessera.train(recipe(tmp_path / "a"), model=policy(), task=PolicyGradient(), dataset=source)
    assert sum(source.rewards[-5:]) > 2 * sum(source.rewards[:5])  # the samples follow the weights
    first = tessera.train(
        recipe(tmp_path / "b"), model=policy(), task=PolicyGradient(), dataset=Rollout(), callbacks=[StopAt(17)]
    )
    assert first.stopped == "test"
    resumed = tessera.resume(first.folder, model=policy(), task=PolicyGradient(), dataset=Rollout())
    expected = weights(complete)
    assert all(torch.equal(expected[name], tensor) for name, tensor in weights(resumed).items())
    assert losses(resumed) == losses(complete)


@pytest.mark.parametrize("returned", [None, [], Batch({}), [{"x": 1}], iter([Batch({})])])
def test_a_source_that_returns_no_batches_is_refused_by_name(returned: Any) -> None:
    class Forgetful(ListSteps):
        def next_step(self) -> Any:
            return returned

    with raises("data.no-batches"):
        DataWait().next_step(Forgetful([]), lambda: False)


def test_ranks_with_different_numbers_of_batches_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def agree(step: int, count: int, *flags: bool) -> tuple[bool, list[bool]]:
        return False, list(flags)

    monkeypatch.setattr("tessera.training.trainer.agree_on_step", agree)
    batches = [Batch({"x": part}) for part in Points(16).x.split(8)]
    with raises("data.unequal-batches"):
        tessera.train(recipe(tmp_path), model=net(), task=Regression(), dataset=ListSteps(batches))


def test_a_method_that_no_task_has_any_more_is_refused(tmp_path: Path) -> None:
    class Old(Regression):
        def frozen_components(self) -> dict[str, Any]:
            return {}

    with raises("task.removed-method"):
        tessera.train(recipe(tmp_path), model=net(), task=Old(), dataset=ListSteps([]))


class SaveInside(Callback):
    """Ask for a save by the clock, which happens when the data of the next step is there already."""

    def on_step_end(self, trainer: Any, result: Any) -> None:
        if result.step == 3:
            trainer._saves._at -= 1e6


def test_a_save_between_data_and_step_holds_the_state_before_the_data(tmp_path: Path) -> None:
    settings = recipe(tmp_path, 5, checkpoint={"every": "60min", "export": False})
    source = Rollout()
    means = []

    class Means(Callback):
        def on_step_begin(self, trainer: Any) -> None:
            means.append(trainer.state_dict()["steps"]["mean"])

    tessera.train(settings, model=policy(), task=PolicyGradient(), dataset=source, callbacks=[SaveInside(), Means()])
    (folder,) = tmp_path.glob("source/checkpoints/step-00000003")
    state = next(json.loads(path.read_text()) for path in folder.glob("*.json") if "mean" in path.read_text())
    assert state["steps"]["mean"] == means[3]
    assert means[0] == 0.0


def test_a_rollout_that_gives_nan_is_skipped_and_its_samples_are_named(tmp_path: Path) -> None:
    class Spoiled(Rollout):
        def next_step(self) -> list[Batch]:
            batches = super().next_step()
            if self.step == 5:
                batches[1]["advantage"][0] = float("nan")
            return batches

    run = tessera.train(recipe(tmp_path, 8), model=policy(), task=PolicyGradient(), dataset=Spoiled())
    (event,) = [json.loads(line) for line in (run.folder / "guard.jsonl").read_text().splitlines()]
    assert (event["step"], event["action"], event["ambiguous"]) == (5, "skipped", True)
    assert len(event["samples"]) == 16


class Stuck(StepSource):
    """Wait until a stop is requested from a signal handler, which runs in the waiting thread."""

    def __init__(self, wait: DataWait) -> None:
        self.wait = wait

    def start(self, step: int, row: int) -> None: ...

    def next_step(self) -> Sequence[Batch]:
        threading.Thread(target=self.wait.end).run()  # in this thread, as a signal handler is
        raise AssertionError("the wait has ended")


def test_a_stop_ends_the_wait_in_the_thread_that_waits_alone() -> None:
    wait = DataWait()
    assert wait.next_step(Stuck(wait), lambda: False) is None
    wait.end()  # nobody waits: nothing is raised
    assert wait.next_step(ListSteps([Batch({})]), lambda: True) is None
    assert wait.next_step(ListSteps([Batch({})]), lambda: False) is not None


def test_a_source_without_rows_has_no_epochs(tmp_path: Path) -> None:
    settings = recipe(tmp_path)
    del settings["train"]["steps"]
    settings["train"]["epochs"] = 1
    with raises("data.unknown-length", "train.epochs"):
        tessera.train(settings, model=policy(), task=PolicyGradient(), dataset=Rollout())
