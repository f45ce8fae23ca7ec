"""A folder of diffusers is proved before it is published, and compared with the folder that it came from."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from generation_families import GENERATION
from parity import randomize
from torch import nn

import tessera
from tessera.config.run_config import ModelSection
from tessera.core.spec import ModelSpec
from tessera.diffusion.wan.config import WanConfig
from tessera.errors import TesseraError
from tessera.inference.export import export_folder
from tessera.inference.proof import prove_folder
from tessera.models import resolve
from tests.errors import raises


def write(name: str, case: str, folder: Path) -> Path:
    """As diffusers saves it, with weights so large that every part matters."""
    family = GENERATION[name]
    model: Any = family.reference(family.config(case))
    randomize(model, seed=2, scale=family.weight_scale)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write("wan", "text", tmp_path_factory.mktemp("wan") / "base")


@pytest.mark.parametrize("name", [name for name in GENERATION if name != "wan"])
def test_every_family_is_compared_with_diffusers(name: str, tmp_path: Path) -> None:
    folder = write(name, next(iter(GENERATION[name].configs)), tmp_path / "model")
    spec, config = resolve(ModelSection(path=folder))
    proof = prove_folder(folder, spec, config, "always")
    assert "diffusers computes the same latents" in proof.line
    assert proof.problems == proof.warnings == ()


def test_a_folder_and_its_conversion_are_compared(wan: Path, tmp_path: Path) -> None:
    out = tessera.convert(wan, tmp_path / "out", prove="always")
    agreement = tessera.compare(out)
    assert agreement.complete, agreement.lines()
    assert "diffusers computes the same latents" in agreement.compared[-1]


FAULTS: dict[str, dict[str, Any]] = {
    "eps": {"eps": 1e-3},
    "num_attention_heads": {"num_attention_heads": 12, "attention_head_dim": 2},
}


@pytest.mark.parametrize("field", FAULTS)
def test_a_config_json_that_is_not_what_was_trained_is_not_published(field: str, wan: Path, tmp_path: Path) -> None:
    class Forgetful(WanConfig):
        def to_hf(self) -> dict[str, Any]:
            return super().to_hf() | FAULTS[field]

    spec, config = resolve(ModelSection(path=wan))
    module = spec.main.build(config)
    with pytest.raises(TesseraError, match=field):
        export_folder(module, spec, Forgetful(**config.model_dump()), None, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def renamed(spec: ModelSpec, names: dict[str, str]) -> ModelSpec:
    component = spec.main

    def weights(config: Any) -> Any:
        table = component.weight_map(config)
        assert table is not None
        rules = tuple(replace(rule, foreign=names.get(str(rule.foreign), rule.foreign)) for rule in table.rules)
        assert rules != table.rules
        return replace(table, rules=rules)

    return replace(spec, main=replace(component, weights={"hf": weights}))


def swap_names(spec: ModelSpec, config: Any) -> ModelSpec:
    table = spec.main.weight_map(config)
    assert table is not None
    up, down = (
        next(str(rule.foreign) for rule in table.rules if part in str(rule.foreign)) for part in ("norm_q", "norm_k")
    )
    return renamed(spec, {up: down, down: up})


def lose_name(spec: ModelSpec, config: Any) -> ModelSpec:
    table = spec.main.weight_map(config)
    assert table is not None
    lost = next(str(rule.foreign) for rule in table.rules if "proj_out" in str(rule.foreign))
    return renamed(spec, {lost: lost.replace("proj_out", "proj_in")})


@pytest.mark.parametrize(
    ("plant", "error"), [(swap_names, "output.export-differs"), (lose_name, "output.export-differs proj_out")]
)
def test_weights_that_diffusers_computes_otherwise_are_not_published(
    plant: Callable[[ModelSpec, Any], ModelSpec], error: str, wan: Path, tmp_path: Path
) -> None:
    spec, config = resolve(ModelSection(path=wan))
    module: nn.Module = spec.main.build(config)
    randomize(module, 1, 0.3)
    with raises(error):
        export_folder(module, plant(spec, config), config, None, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_machine_without_diffusers_is_told(wan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "diffusers" else find(name))
    spec, config = resolve(ModelSection(path=wan))
    assert "not compared with diffusers: the library is not installed" in prove_folder(wan, spec, config).line
