"""A task with two losses, each with a count of its own, trains alike in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.close import assert_within_rounding
from tests.dist.spawn import run_ranks
from tests.dist.test_trainer_layouts import run_each, run_once, tensors
from tests.quick import quick

LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {"train.micro_batch": 4}),
    (2, {}),
    (2, {"parallel.tp": 2}),
    (2, {"parallel.cp": 2}),
    (2, {"parallel.pp": 2}),
]


def recipe(out: Path) -> dict[str, Any]:
    return {
        "name": "two",
        "out": str(out),
        "model": {"family": "tests.toys.moe_decoder", "preset": "tiny", "config": {"balance": 0.0}},
        "data": {"kind": "tests.toys.token_rows", "length": 32, "workers": 0},
        "train": {
            **{"steps": 2, "global_batch": 4, "micro_batch": 1, "device": "cpu"},
            "task": "tests.toys.two_loss_task",
        },
        "optim": {"lr": 1e-3},
        "checkpoint": {"at_end": False},
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_once(0, 1, recipe(tmp_path_factory.mktemp("one")), {}, None)


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_once(0, 1, recipe(tmp_path_factory.mktemp("moved")), {}, 1, move=True)[0]


@pytest.fixture(scope="module")
def layouts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """Only those that tests of the file ask for, whatever was deselected."""
    tests = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    wanted = {item.callspec.params["number"] for item in tests if hasattr(item, "callspec")}
    results: dict[int, Any] = {}
    for world in {LAYOUTS[number][0] for number in wanted}:
        here = [number for number in sorted(wanted) if LAYOUTS[number][0] == world]
        recipes = [recipe(tmp_path_factory.mktemp("layout")) for _ in here]
        each = [LAYOUTS[number][1] for number in here]
        ranks = run_ranks(run_each, world, recipes, each) if world > 1 else [run_each(0, 1, recipes, each)]
        for at, number in enumerate(here):
            gradients = {name: value for rank in ranks for name, value in rank[at][0].items()}  # stages have their own
            results[number] = (gradients, ranks[0][at][1])
    return results


@pytest.mark.parametrize(
    "number", quick(range(len(LAYOUTS)), 0, 4), ids=[f"{world} {settings}" for world, settings in LAYOUTS]
)
def test_every_layout_gives_the_gradients_of_one_process(number: int, layouts: Any, alone: Any, moved: Any) -> None:
    gradients, losses = layouts[number]
    assert_within_rounding(tensors(gradients), tensors(alone[0]), tensors(moved))
    assert losses == pytest.approx(alone[1], rel=1e-5)
