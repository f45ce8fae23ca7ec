"""How long a run is and how often it does something, in the units of a user: steps, minutes, epochs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tessera
from tessera.config.run_config import load_config
from tessera.config.run_length import Interval, RunLength, parse_interval
from tessera.core.callback import Callback
from tessera.training.setup import build_meta_model, check_rows
from tests.errors import raises
from tests.toys.chat_set import chat_recipe, write_chat_set


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_set(tmp_path_factory.mktemp("chat"), samples=12)


def quick(data: Path, out: Path, **train: Any) -> dict[str, Any]:
    settings = chat_recipe(data, out, **{"global_batch": 2, **train})
    settings["guard"] = {"coverage": "off"}
    if "epochs" in train:
        settings["train"].pop("steps")
    return settings


# ---------------------------------------------------------------------------------------------- units


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        (500, Interval(500)),
        ("500", Interval(500)),
        ("500 steps", Interval(500)),
        ("10min", Interval(10, "minutes")),
        ("1 Minute", Interval(1, "minutes")),
        ("2h", Interval(120, "minutes")),
        ("90s", Interval(1.5, "minutes")),
        ("1epoch", Interval(1, "epochs")),
        ("0.25 epochs", Interval(0.25, "epochs")),
    ],
)
def test_an_interval_is_a_number_and_a_unit(value: int | str, meant: Interval) -> None:
    assert parse_interval(value) == meant


@pytest.mark.parametrize("text", ["", "often", "1.5steps", "-1epoch", "10 apples", "1e99h", "epoch", "ten minutes"])
def test_what_is_no_interval_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"steps|number|interval"):
        parse_interval(text)


def test_an_epoch_ends_within_the_step_that_draws_its_last_row() -> None:
    length = RunLength(steps=20, rows_per_step=4, rows_per_epoch=10)
    done = [step for step in range(1, 21) if length.due(Interval(1, "epochs"), step, 4 * step)]
    assert done == [3, 5, 8, 10, 13, 15, 18, 20]  # rows 12, 20, 32, 40: the first step at or behind each 10, 20, 30, 40
    tenths = RunLength(steps=100, rows_per_step=1, rows_per_epoch=10)
    assert [step for step in range(1, 31) if tenths.due(Interval(0.3, "epochs"), step, step)] == list(range(3, 31, 3))


def test_epochs_are_the_fewest_whole_steps() -> None:
    assert RunLength.of(None, 1, 4, 10).steps == 3
    assert RunLength.of(None, 3, 4, 12).steps == 9
    assert RunLength.of(None, 0.1, 1, 30).steps == 3  # 0.1 * 30 is a little more than 3 in floats
    assert RunLength.of(None, 1e-6, 4, 10).steps == 1


def test_an_absurd_number_of_epochs_is_warned_of_and_a_sound_one_is_not() -> None:
    assert RunLength(1500, 8, 5).warning() is not None
    assert "2,400 times" in str(RunLength(1500, 8, 5).warning())
    assert str(RunLength(1, 100_000, 2).warning()).endswith("the data has 2 packed sequences. Lower train.global_batch")
    assert RunLength(100, 8, 100).warning() is None
    assert RunLength(10**6, 8, None).warning() is None


def test_one_of_a_thing_is_counted_as_one() -> None:
    assert RunLength(30, 1, 1).describe() == "one epoch = 1 packed sequence = 1 step; this run = 30 steps = 30 epochs"
    assert "2 packed sequences, and a step takes 4; this run = 1 step = 2 epochs" in RunLength(1, 4, 2).describe()


@pytest.mark.parametrize(
    ("train", "error"),
    [
        ({"steps": 3, "epochs": 1}, "recipe.wrong-value"),
        ({}, "recipe.wrong-value"),
        ({"epochs": 0}, "recipe.wrong-value"),
        ({"steps": 3, "eval_every": "5min"}, "recipe.wrong-value"),
    ],
)
def test_a_length_that_says_nothing_or_two_things_is_refused(train: dict[str, Any], error: str) -> None:
    with raises(error):
        load_config({"model": {"family": "qwen2_vl"}, "train": train})


def test_rows_that_are_not_packed_are_not_called_so() -> None:
    length = RunLength.of(2_000, None, 4, 8)
    assert "8 packed sequences = 2 steps" in length.describe()
    assert "share a packed sequence" in str(length.warning())
    plain = replace(length, packed=False)
    assert "8 rows = 2 steps" in plain.describe()
    assert "packed" not in str(plain.warning())


def test_an_override_in_another_unit_takes_the_place_of_the_length() -> None:
    recipe = {"model": {"family": "qwen2_vl"}, "train": {"steps": 100}}
    train = load_config(recipe, {"train.epochs": 2}).train
    assert (train.steps, train.epochs) == (None, 2)


# ---------------------------------------------------------------------------------------------- runs


def test_a_run_of_epochs_saves_and_evaluates_by_epochs_and_says_what_they_are(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = quick(data, tmp_path, epochs=2, eval_every="1epoch")
    recipe["checkpoint"] = {"every": "1epoch", "keep": 9}
    run = tessera.train(recipe)
    text = capsys.readouterr().err
    rows = int(text.split("one epoch = ")[1].split(" packed")[0])
    per_epoch, last = -(-rows // 2), rows  # two rows a step
    assert f"this run = {last} steps = 2 epochs" in text
    saved = sorted(path.name for path in (run.folder / "checkpoints").glob("step-*"))
    assert saved == [f"step-{per_epoch:08d}", f"step-{last:08d}"]
    trained = [row for row in run.metrics if row["kind"] == "train"]
    assert [row["step"] for row in run.metrics if row["kind"] == "eval"] == [per_epoch, last]
    assert [row["epoch"] for row in trained] == [round(2 * step / rows, 6) for step in range(1, last + 1)]
    # The run keeps epochs: a resume with more of them goes on.
    assert tessera.resume(run.folder, {"train.epochs": 2.5}).metrics[-1]["step"] == -(-5 * rows // 4)


class Measured(Callback):
    """Report planted values of a held-out metric, one after each step."""

    def __init__(self, values: list[float], stop_at: int | None = None) -> None:
        self.values, self.stop_at = values, stop_at

    def on_step_end(self, trainer: Any, result: Any) -> None:
        trainer.report_eval({"score": self.values[result.step - 1]})
        if result.step == self.stop_at:
            trainer.request_stop("planted")


def best_recipe(data: Path, out: Path, **train: Any) -> dict[str, Any]:
    recipe = quick(data, out, **{"steps": 8, "eval_every": 100, **train})
    recipe["checkpoint"] = {"every": 3, "keep": 1, "keep_best": "score"}
    return recipe


def test_the_best_checkpoint_is_kept_however_old_it_is(data: Path, tmp_path: Path) -> None:
    run = tessera.train(best_recipe(data, tmp_path), callbacks=[Measured([0.1, 0.9, 0.5, 0.4, 0.3, 0.8, 0.2, 0.1])])
    saved = sorted(path.name for path in (run.folder / "checkpoints").glob("step-*"))
    assert saved == ["step-00000002", "step-00000008"]
    best = json.loads((run.folder / "best.json").read_text())
    assert best == {"metric": "score", "value": 0.9, "step": 2, "checkpoint": "checkpoints/step-00000002"}


def test_a_best_checkpoint_that_is_surpassed_is_removed(data: Path, tmp_path: Path) -> None:
    run = tessera.train(best_recipe(data, tmp_path, steps=4), callbacks=[Measured([0.1, 0.9, 0.2, 0.95])])
    assert [path.name for path in (run.folder / "checkpoints").glob("step-*")] == ["step-00000004"]


@pytest.mark.slow
def test_an_early_stop_and_its_best_step_survive_a_resume(data: Path, tmp_path: Path) -> None:
    values = [0.1, 0.9, 0.5, float("nan"), 0.3, 1.8, 0.2, 0.1]
    stop = {"metric": "score", "patience": 3}
    whole = tessera.train(best_recipe(data, tmp_path / "whole", early_stop=stop), callbacks=[Measured(values)])
    recipe = best_recipe(data, tmp_path / "parts", early_stop=stop)
    assert tessera.train(recipe, callbacks=[Measured(values, stop_at=4)]).stopped == "planted"
    parts = tessera.resume(tmp_path / "parts" / "chat", callbacks=[Measured(values)])
    for run in (whole, parts):
        assert run.stopped is None
        assert run.ended_early is not None
        assert "in 3 evaluations; best held-out score 0.9000 at step 2" in run.ended_early
        assert [row["step"] for row in run.metrics if row["kind"] == "train"] == [1, 2, 3, 4, 5]
        assert sorted(path.name for path in (run.folder / "checkpoints").glob("step-*"))[0] == "step-00000002"
    assert (whole.folder / "best.json").read_text() == (parts.folder / "best.json").read_text()
    again = tessera.resume(parts.folder, callbacks=[Measured(values)])  # there is still nothing to do
    assert again.ended_early == parts.ended_early
    assert again.metrics == parts.metrics


def test_a_best_metric_without_evaluations_to_choose_from_is_refused(data: Path, tmp_path: Path) -> None:
    recipe = quick(data, tmp_path)
    recipe["checkpoint"] = {"keep_best": "loss"}
    with raises("recipe.held-out-never-measured"):
        tessera.train(recipe)
    recipe["train"]["eval_every"], recipe["data"]["eval"] = 1, []
    with raises("recipe.no-held-out-data"):
        tessera.train(recipe)


@pytest.mark.slow
def test_a_metric_that_is_not_measured_is_named_with_the_nearest_one(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = quick(data, tmp_path, steps=2, eval_every=1)
    recipe["checkpoint"] = {"keep_best": "lose"}
    tessera.train(recipe)
    assert "no metric 'lose' (did you mean loss?): it has loss" in capsys.readouterr().err


def test_a_plan_says_what_a_run_would_refuse_and_a_run_refuses_it_first(tmp_path: Path) -> None:
    recipe = {"model": {"family": "qwen2_vl", "preset": "quickstart"}, "train": {"steps": 1, "global_batch": 3}}
    assert not any("refuses" in note for note in tessera.plan(recipe, world=3).notes)
    notes = tessera.plan(recipe, world=2).notes
    assert any("global_batch 3 does not split over 2 ranks" in note and "global_batch=4" in note for note in notes)
    plan = build_meta_model(load_config(recipe), 2).plan
    with raises("layout.batch-not-divisible"):
        check_rows(load_config(recipe), plan)
    check_rows(load_config(recipe, {"train.samples_per_step": 5}), plan)  # as many rows as they need
    check_rows(load_config(recipe, {"data.kind": "custom", "data.options": {"dataset": "some:Thing"}}), plan)
