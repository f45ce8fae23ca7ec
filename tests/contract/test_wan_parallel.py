"""A tiny Wan, trained through the trainer on several ranks like on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

import tessera
from tessera.config.run_config import load_config
from tessera.errors import TesseraError
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
    assert "no parameters of style `sequence`" in refused(tp=2, sequence_parallel=True)
    assert "does not divide the 4 heads" in refused(world=3, tp=3)


def test_an_export_is_a_transformer_that_diffusers_loads(tmp_path: Path) -> None:
    recipe = videos_recipe(tmp_path)
    recipe["model"]["family"] = "wan"
    tessera.train(recipe, {"train.steps": 1, "checkpoint.export": True, "checkpoint.at_end": True})
    folder = tmp_path / "experts" / "hf"
    theirs = diffusers.WanTransformer3DModel.from_pretrained(folder, use_safetensors=True).state_dict()
    loaded, _ = tessera.load(folder, device="cpu")
    ours = loaded.spec.main.weight_map(loaded.config).to_foreign(dict(loaded.module.named_parameters()))
    assert all(torch.equal(theirs[name], tensor) for name, tensor in ours.items())
    assert theirs["proj_out.weight"].any()  # it begins as zero
