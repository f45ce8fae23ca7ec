"""A tiny Wan, trained through the trainer on several ranks like on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from family_layouts import train_like_one_process

from tessera.core.errors import TesseraError
from tessera.core.run_config import load_config
from tessera.training.setup import build_meta_model
from tests.dist.layouts import Case, videos_recipe

IMAGES: dict[str, Any] = {
    "model.config.image_dim": 10,
    "model.config.added_kv_proj_dim": 32,
    "model.config.pos_embed_seq_len": 6,
    "data.options.images": 6,
}
USUAL = [
    Case("wan, tp 2", 2, {"tp": 2}, toy="videos"),
    Case("wan, pp 2", 2, {"pp": 2}, toy="videos"),
    Case("wan, ring 2", 2, {"cp": 2, "ulysses": 1}, toy="videos"),
]
MORE = [
    Case("wan, fsdp 2", 2, toy="videos"),
    Case("wan, ulysses 2", 2, {"cp": 2}, toy="videos"),
    Case("wan, two rows in a micro-batch", 2, split={"train.micro_batch": 2}, toy="videos"),
    Case("wan, recompute", 2, {"recompute": ["blocks.{*}"]}, toy="videos"),
    Case("wan, given images, tp 2", 2, {"tp": 2}, IMAGES, toy="videos"),
    Case("wan, given images, pp 2", 2, {"pp": 2}, IMAGES, toy="videos"),
    Case("wan, given images, ring 2", 2, {"cp": 2, "ulysses": 1}, IMAGES, toy="videos"),
    Case("wan, fsdp 2 x tp 2", 4, {"tp": 2}, toy="videos"),
    Case("wan, fsdp 2 x pp 2", 4, {"pp": 2}, toy="videos"),
    Case("wan, fsdp 2 x ulysses 2", 4, {"cp": 2}, toy="videos"),
    Case("wan, tp 2 x pp 2", 4, {"tp": 2, "pp": 2}, toy="videos"),
    Case("wan, tp 2 x ulysses 2", 4, {"tp": 2, "cp": 2}, toy="videos"),
    Case("wan, tp 2 x ring 2", 4, {"tp": 2, "cp": 2, "ulysses": 1}, toy="videos"),
    Case("wan, pp 2 x ulysses 2", 4, {"pp": 2, "cp": 2}, toy="videos"),
    Case("wan, ring 2 x ulysses 2", 4, {"cp": 4, "ulysses": 2}, toy="videos"),
]


def test_usual_layouts_train_like_one_process(tmp_path: Path) -> None:
    train_like_one_process(USUAL, tmp_path)


@pytest.mark.slow
def test_other_layouts_and_pairs_train_like_one_process(tmp_path: Path) -> None:
    train_like_one_process(MORE, tmp_path)


def refused(world: int = 2, **parallel: Any) -> str:
    changes = {f"parallel.{key}": value for key, value in parallel.items()}
    with pytest.raises(TesseraError) as error:
        build_meta_model(load_config(videos_recipe(Path("unused")), changes), world)
    return str(error.value)


def test_what_cannot_be_split_is_refused() -> None:
    assert "no one module that could keep parts of the tokens" in refused(tp=2, sequence_parallel=True)
    assert "does not divide the 4 heads" in refused(world=3, tp=3)
