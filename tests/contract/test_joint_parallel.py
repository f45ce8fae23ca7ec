"""Tiny transformers over text and latents, trained through the trainer on several ranks like on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from family_layouts import train_like_one_process

from tests.dist.layouts import Case


def case(name: str, world: int, parallel: dict[str, Any], split: dict[str, Any] | None = None, **config: Any) -> Case:
    positions = "table" if "table" in config else "grid"
    model = {
        "model": {"family": "tests.toys.drawn_joint", "config": config},
        "data": {"kind": "tests.toys.image_rows", "length": 96, "options": {"positions": positions}},
    }
    return Case(f"joint, {name}", world, parallel, model, toy="experts", split=split or {})


ALL: dict[str, Any] = {"dual": True, "table": 8}  # Flux and Stable Diffusion 3.5 at once
DOUBLE: dict[str, Any] = {"dual": True, "single": 0}
REFERENCES: dict[str, Any] = {"reference_time": True, "single": 0}  # as Qwen-Image-Edit
USUAL = [case("tp 2", 2, {"tp": 2}, **ALL), case("ring 2", 2, {"cp": 2, "ulysses": 1}, **ALL)]
MORE = [
    case("fsdp 2", 2, {}, **ALL),
    case("pp 2", 2, {"pp": 2}, **ALL),
    case("ulysses 2", 2, {"cp": 2}, **ALL),
    case("two rows in a micro-batch", 2, {}, {"train.micro_batch": 2}, **ALL),
    case("recompute", 2, {"recompute": ["blocks.{*}", "single_blocks.{*}"]}, **ALL),
    case("double alone, pp 2", 2, {"pp": 2}, **DOUBLE),
    case("double alone, ulysses 2", 2, {"cp": 2}, **DOUBLE),
    case("references, tp 2", 2, {"tp": 2}, **REFERENCES),
    case("references, pp 2", 2, {"pp": 2}, **REFERENCES),
    case("references, ring 2", 2, {"cp": 2, "ulysses": 1}, **REFERENCES),
    case("tp 2 x pp 2", 4, {"tp": 2, "pp": 2}, **ALL),
    case("tp 2 x ulysses 2", 4, {"tp": 2, "cp": 2}, **ALL),
    case("pp 2 x ring 2", 4, {"pp": 2, "cp": 2, "ulysses": 1}, **ALL),
    case("fsdp 2 x tp 2", 4, {"tp": 2}, **ALL),
]


@pytest.mark.slow
def test_usual_layouts_train_like_one_process(tmp_path: Path) -> None:
    train_like_one_process(USUAL, tmp_path)


@pytest.mark.slow
def test_other_layouts_and_pairs_train_like_one_process(tmp_path: Path) -> None:
    train_like_one_process(MORE, tmp_path)
