"""Plans need no process group; what cannot work is refused with what would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import tessera
from tessera.core.errors import TesseraError
from tessera.parallel.plan import Plan


def plan(world: int = 1, preset: str = "quickstart", **overrides: Any) -> Plan:
    recipe = {"model": {"family": "qwen2_vl", "preset": preset}, "train": {"steps": 1}}
    return tessera.plan(recipe, {key.replace("__", "."): value for key, value in overrides.items()}, world=world)


def test_a_plan_of_72b_on_a_thousand_ranks_is_made_on_a_laptop() -> None:
    made = plan(1024, "72b", parallel__param_dtype="bfloat16", parallel__shard=64)
    assert not dist.is_initialized()
    assert (made.replicate, made.shard, made.param_dtype) == (16, 64, torch.bfloat16)
    assert 72e9 < made.parameters < 75e9
    assert made.parameter_bytes == pytest.approx(made.parameters * 4 / 64, rel=0.01)
    assert made.optimizer_bytes == 2 * made.gradient_bytes
    assert "16 replicated x 64 sharded" in made.describe()


def test_blocks_are_the_layers_of_both_towers() -> None:
    made = plan()
    assert "text.layers.0" in made.blocks
    assert "vision.blocks.2" in made.blocks


def test_frozen_towers_have_no_gradients() -> None:
    made = plan(model__freeze=["vision", "projector"])
    whole = plan()
    assert all(name.startswith(("vision.", "projector.")) for name in made.frozen)
    assert made.trained < whole.trained == whole.parameters
    assert made.gradient_bytes == made.trained * 4


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"parallel__shard": 3}, "does not divide"),
        ({"parallel__recompute": ["text.layer.{*}"]}, "matches nothing"),
        ({"parallel__recompute": ["text.layers.{0}", "text.layers.{*}.attn"]}, "twice"),
        ({"model__freeze": ["text", "vision", "projector"]}, "nothing to train"),
        ({"model__preset": "7bb"}, "7b"),
        ({"model__family": "qwen2_lv"}, "qwen2_vl"),
        ({"model__config": {"text": {"hidden_sizes": 3}}}, "hidden_size"),
    ],
)
def test_what_cannot_work_is_refused(overrides: dict[str, Any], words: str) -> None:
    with pytest.raises(TesseraError, match=words):
        plan(8, **overrides)


def test_the_plan_is_frozen() -> None:
    with pytest.raises(AttributeError):
        plan().world = 2  # type: ignore[misc]
