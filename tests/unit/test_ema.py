"""The average of weights: what it is, that it survives a resume, and who uses it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tessera
from tessera.core.callback import Callback, StepResult
from tests.errors import raises
from tests.toys.callbacks import StopAt
from tests.toys.chat_set import chat_recipe, write_chat_set


class Follow(Callback):
    """The same average, in plain words."""

    def __init__(self, decay: float, every: int = 1) -> None:
        self.decay, self.every, self.updates = decay, every, 0
        self.average: dict[str, torch.Tensor] = {}

    def on_start(self, trainer: Any) -> None:
        self.average = {n: p.detach().clone() for n, p in trainer.module.named_parameters()}

    def on_step_end(self, trainer: Any, result: StepResult) -> None:
        if result.step % self.every:
            return
        keep = min(self.decay, (1 + self.updates) / (10 + self.updates)) ** self.every
        self.updates += 1
        for name, parameter in trainer.module.named_parameters():
            self.average[name] = keep * self.average[name] + (1 - keep) * parameter.detach()


def saved(run: tessera.Run) -> dict[str, torch.Tensor]:
    assert run.checkpoint is not None
    return {n: t for path in run.checkpoint.glob("*.safetensors") for n, t in load_file(path).items()}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_set(tmp_path_factory.mktemp("chat"), samples=20)


def recipe(data: Path, out: Path, **ema: Any) -> dict[str, Any]:
    settings = chat_recipe(data, out, micro_batch=4, ema={"decay": 0.6, **ema})
    settings["data"]["workers"] = 0
    return settings


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Follow, tessera.Run]:
    """A run with the average of every step, and the same average in plain words."""
    follow = Follow(0.6)
    return follow, tessera.train(recipe(data, tmp_path_factory.mktemp("whole")), callbacks=[follow])


@pytest.mark.parametrize("every", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_it_is_the_average_that_was_asked_for(
    data: Path, tmp_path: Path, every: int, whole: tuple[Follow, tessera.Run]
) -> None:
    follow, run = whole
    if every != 1:
        follow = Follow(0.6, every)
        run = tessera.train(recipe(data, tmp_path, every=every), callbacks=[follow])
    tensors = saved(run)
    for name, expected in follow.average.items():
        torch.testing.assert_close(tensors[f"ema.{name}"], expected, rtol=1e-5, atol=1e-7)
    assert any(not torch.equal(tensors[f"ema.{n}"], tensors[f"model.{n}"]) for n in follow.average)


def test_a_resume_goes_on_with_it_bitwise(data: Path, tmp_path: Path, whole: tuple[Follow, tessera.Run]) -> None:
    expected = saved(whole[1])
    part = tessera.train(recipe(data, tmp_path / "part"), callbacks=[StopAt(3)])
    tensors = saved(tessera.resume(part.folder))
    assert expected.keys() == tensors.keys()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in expected.items())


@pytest.mark.slow
def test_it_may_begin_in_the_middle(data: Path, tmp_path: Path) -> None:
    settings = recipe(data, tmp_path)
    del settings["train"]["ema"]
    part = tessera.train(settings, callbacks=[StopAt(5)])
    before = saved(part)
    run = tessera.resume(part.folder, {"train.ema": {"decay": 0.5, "warmup": False}})
    tensors = saved(run)
    name = "text.norm.weight"
    torch.testing.assert_close(tensors[f"ema.{name}"], (before[f"model.{name}"] + tensors[f"model.{name}"]) / 2)


class Tally(Callback):
    """Count steps, over resumes too."""

    steps = 0

    def on_step_end(self, trainer: Any, result: StepResult) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state.get("steps", 0)


class StepTally(Tally):
    """The same callback under another name."""


@pytest.mark.slow
def test_state_that_no_callback_takes_up_is_named(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    part = tessera.train(recipe(data, tmp_path), callbacks=[StopAt(2), Tally()])
    capsys.readouterr()
    tessera.resume(part.folder, {"train.ema": None}, callbacks=[StepTally()])
    said = capsys.readouterr().err
    assert "state of a callback Tally, which this run does not have" in said
    assert "This run has StepTally" in said
    assert "state of a callback Ema, which this run does not have" in said
    assert "contains tensors of kinds that this run does not use: ema" in said


def test_two_callbacks_with_state_under_one_name_are_refused(data: Path, tmp_path: Path) -> None:
    with raises("run.callback-name-twice"):
        tessera.train(recipe(data, tmp_path), callbacks=[Tally(), Tally()])


def test_evaluation_and_export_use_it(data: Path, tmp_path: Path) -> None:
    settings = recipe(data, tmp_path / "a", decay=0.99, warmup=False)
    settings["checkpoint"] = {"export": True, "prove": "never"}
    averaged = tessera.train(settings)
    plain = tessera.train({**settings, "out": str(tmp_path / "b")}, {"train.ema.evaluate": False})
    of = lambda run: next(row["eval_loss"] for row in run.metrics if "eval_loss" in row)  # noqa: E731
    assert of(averaged) > of(plain) + 0.1  # six steps move it by six hundredths of the way
    assert saved(averaged)["model.text.norm.weight"].equal(saved(plain)["model.text.norm.weight"])
    exported = load_file(averaged.folder / "hf-ema" / "model.safetensors")
    name = next(name for name in exported if name.endswith("language_model.norm.weight") or name == "model.norm.weight")
    assert exported[name].equal(saved(averaged)["ema.text.norm.weight"])
    assert load_file(averaged.folder / "hf" / "model.safetensors")[name].equal(
        saved(averaged)["model.text.norm.weight"]
    )


def test_answers_are_given_on_the_way(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = recipe(data, tmp_path)
    settings["train"] |= {"generate_every": 4, "generate_samples": 5, "generate_tokens": 4}
    run = tessera.train(settings)
    assert {path.name for path in run.folder.glob("answers-step-*")} == {"answers-step-4.jsonl", "answers-step-6.jsonl"}
    rows = [row for row in run.metrics if "eval_exact_match" in row]
    assert [row["step"] for row in rows] == [4, 6]
    from tessera.runtime.files import read_jsonl

    answers = list(read_jsonl(run.folder / "answers-step-6.jsonl"))
    assert [row["id"] for row in answers] == [f"sample-{n}" for n in range(5)]
    assert {"expected", "answer", "correct", "question"} <= answers[0].keys()
    assert rows[-1]["eval_exact_match"] == sum(row["correct"] for row in answers) / 5
    assert "exact_match" in capsys.readouterr().err
    page = (run.folder / "report.html").read_text()
    assert "Exact answers" in page
    assert "Held-out answers" in page


@pytest.mark.slow
def test_answers_are_those_of_the_trained_model(data: Path, tmp_path: Path) -> None:
    settings = recipe(data, tmp_path, decay=0.9)
    settings["train"] |= {"generate_every": 6, "generate_samples": 3, "generate_tokens": 4}
    settings["train"]["ema"]["evaluate"] = False
    run = tessera.train(settings)
    from tessera.runtime.files import read_jsonl

    told = [row["answer"] for row in read_jsonl(run.folder / "answers-step-6.jsonl")]
    again = tessera.evaluate(run.folder, max_samples=3, max_new_tokens=4)
    assert told == [row["answer"] for row in read_jsonl(again.results[0].answers)]


def test_without_held_out_data_there_is_nothing_to_answer(data: Path, tmp_path: Path) -> None:
    settings = recipe(data, tmp_path)
    settings["train"]["generate_every"] = 2
    settings["data"]["eval"] = []
    with raises("recipe.no-held-out-data"):
        tessera.train(settings)
