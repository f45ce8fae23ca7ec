"""A tiny Wan, trained through the trainer on several ranks like on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tessera.core.errors import TesseraError
from tessera.core.run_config import load_config
from tessera.training.setup import build_meta_model
from tests.dist.layout_cases import VIDEOS
from tests.dist.layouts import Case, good, measure_selected, params, videos_recipe


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    return measure_selected(request, tmp_path_factory.mktemp("layouts"))


@pytest.mark.parametrize("case", params(VIDEOS))
def test_a_layout_trains_like_one_process_and_holds_what_its_plan_says(case: Case, measured: Any) -> None:
    assert good(measured[case.name]), measured[case.name]


def refused(world: int = 2, **parallel: Any) -> str:
    changes = {f"parallel.{key}": value for key, value in parallel.items()}
    with pytest.raises(TesseraError) as error:
        build_meta_model(load_config(videos_recipe(Path("unused")), changes), world)
    return str(error.value)


def test_what_cannot_be_split_is_refused() -> None:
    assert "no one module that could keep parts of the tokens" in refused(tp=2, sequence_parallel=True)
    assert "does not divide the 4 heads" in refused(world=3, tp=3)
