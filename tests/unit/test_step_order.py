"""Steps of a number of samples: how many they have, that they fit, and that layouts and resumes do not change them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tessera
from tessera.config.run_length import RunLength
from tessera.data.order.order import PackingConfig, Samples
from tessera.data.order.step_order import StepOrder, StepSize, step_order
from tessera.errors import TesseraError
from tessera.training.records import read_ledger
from tests.toys.callbacks import StopAt
from tests.toys.chat_set import chat_recipe, write_chat_set

LENGTH = 2048


def lengths(count: int, seed: int = 0) -> np.ndarray:
    """Many short samples and a few as long as a row."""
    return np.minimum(LENGTH, np.random.default_rng(seed).lognormal(5.5, 1.0, count).astype(np.int64) + 1)


def order(tokens: np.ndarray, size: StepSize, weights: tuple[float, ...] | None = None, **packing: Any) -> StepOrder:
    starts = np.array([0, len(tokens)] if weights is None else [0, len(tokens) // 3, len(tokens)])
    return step_order(Samples(tokens, starts, weights), PackingConfig(LENGTH, **{"seed": 3, **packing}), size)


def steps(stepped: StepOrder, first: int, count: int) -> list[list[list[int]]]:
    rows = stepped.rows_per_step
    return [[stepped.samples(step * rows + row) for row in range(rows)] for step in range(first, first + count)]


@pytest.mark.parametrize(("count", "samples"), [(400, 10), (397, 64), (130, 128), (10, 64), (64, 64)])
@pytest.mark.parametrize("multiple", [1, 4])
def test_every_step_has_its_samples_in_rows_that_hold_them(count: int, samples: int, multiple: int) -> None:
    tokens = lengths(count)
    stepped = order(tokens, StepSize(samples, multiple=multiple))
    assert stepped.rows_per_step % multiple == 0
    assert stepped.steps == -(-count // samples)
    for epoch in (0, 7):
        drawn: Counter[int] = Counter()
        for step in steps(stepped, epoch * stepped.steps, stepped.steps):
            assert all(step), "no row is empty"
            assert sum(map(len, step)) == samples
            assert max(sum(int(tokens[one]) for one in row) for row in step) <= LENGTH
            drawn.update(one for row in step for one in row)
        assert set(drawn) == set(range(count)), "every sample comes in every epoch"
        assert max(drawn.values()) <= -(-stepped.steps * samples // count), "and as few as possible twice"


def test_rows_are_hardly_more_than_the_samples_take_on_average() -> None:
    tokens = lengths(5000)
    stepped = order(tokens, StepSize(128))
    least = 128 * float(tokens.mean()) / LENGTH
    assert stepped.rows_per_step <= least + 1 + 2  # the longest sample, and what packing whole samples leaves over


def test_epochs_are_shuffled_anew_and_any_step_is_found_by_itself() -> None:
    stepped = order(lengths(320), StepSize(32))
    first, second = steps(stepped, 0, stepped.steps), steps(stepped, stepped.steps, stepped.steps)
    together = [[sorted(one for row in step for one in row) for step in epoch] for epoch in (first, second)]
    assert not any(step in together[1] for step in together[0])
    assert steps(stepped, 10**9, 1) == steps(order(lengths(320), StepSize(32)), 10**9, 1)
    assert steps(order(lengths(320), StepSize(32), seed=4), 0, 3) != first[:3]


def test_the_samples_of_a_step_do_not_depend_on_its_rows() -> None:
    few, many = order(lengths(320), StepSize(32)), order(lengths(320), StepSize(32, multiple=16))
    assert few.rows_per_step != many.rows_per_step
    assert few.identity == many.identity
    for first, other in zip(steps(few, 5, 8), steps(many, 5, 8), strict=True):
        assert sorted(sample for row in first for sample in row) == sorted(sample for row in other for sample in row)
    # A position of one is a position of the other.
    length = [RunLength(100, o.rows_per_step, len(o), 32) for o in (few, many)]
    position = length[0].position(17 * few.rows_per_step)
    assert length[1].row_after(position) == 17 * many.rows_per_step


def test_weights_of_sets_hold_over_steps() -> None:
    stepped = order(lengths(300), StepSize(30), weights=(3.0, 1.0))
    drawn = [one for step in steps(stepped, 0, stepped.steps) for row in step for one in row]
    assert len(drawn) == 300
    assert sum(one < 100 for one in drawn) == 225


@pytest.mark.parametrize(
    ("size", "packing", "message"),
    [
        (StepSize(8), {"shuffle": False}, "data.steps-need-shuffle"),
        (StepSize(8, multiple=16), {}, "run.too-few-samples-per-step"),
        (StepSize(6, multiple=4), {"pack": False}, "train.samples_per_step=8"),
    ],
)
def test_what_cannot_be_is_refused(size: StepSize, packing: dict[str, Any], message: str) -> None:
    with pytest.raises(TesseraError) as caught:
        order(lengths(100), size, **packing)
    assert message in str(caught.value)


def test_a_run_has_the_same_samples_in_the_same_steps_after_a_resume_with_other_rows(tmp_path: Path) -> None:
    data = write_chat_set(tmp_path / "data", samples=12)

    def recipe(out: Path) -> dict[str, Any]:
        recipe_of_run = chat_recipe(data, out, steps=7, samples_per_step=5, global_batch=1)
        recipe_of_run["data"]["eval"] = []
        return recipe_of_run | {"checkpoint": {"every": 0}, "guard": {"coverage": "off"}}

    whole = tessera.train(recipe(tmp_path / "a"))
    part = tessera.train(recipe(tmp_path / "b"), callbacks=[StopAt(4)])
    parts = tessera.resume(part.folder, {"train.micro_batch": 4})  # a step has four rows then
    sets = [
        {step: sorted(one for _, ids in rows for one in ids) for step, rows in read_ledger(run.folder).items()}
        for run in (whole, parts)
    ]
    assert sets[0] == sets[1]
    assert {len(samples) for samples in sets[0].values()} == {5}
    losses = [[row["loss"] for row in run.metrics if row["kind"] == "train"] for run in (whole, parts)]
    assert losses[0][:4] == losses[1][:4]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)  # the same samples, summed in other rows
    assert [row["epoch"] for row in whole.metrics if row["kind"] == "train"][2] == 1.0
