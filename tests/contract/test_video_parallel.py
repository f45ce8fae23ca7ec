"""Tiny video families, trained through the trainer on several ranks like on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from family_layouts import train_like_one_process

from tests.dist.layouts import Case

_HEADS = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2}
_HUNYUAN = {**_HEADS, "num_refiner_layers": 1, "text_embed_dim": 12, "rope_axes_dim": [2, 2, 4], "out_channels": 2}
MODELS: dict[str, dict[str, Any]] = {
    "ltx_video": {**_HEADS, "cross_attention_dim": 32, "in_channels": 16, "out_channels": 16, "caption_channels": 12},
    "cogvideox": {
        **_HEADS,
        "attention_head_dim": 16,
        "in_channels": 2,
        "out_channels": 2,
        "time_embed_dim": 16,
        "text_embed_dim": 12,
        "use_rotary_positional_embeddings": True,
    },
    "hunyuan_video": {**_HUNYUAN, "in_channels": 2, "num_single_layers": 2, "pooled_projection_dim": 6},
    "hunyuan_video_1_5": {
        **_HUNYUAN,
        "in_channels": 5,
        "patch_size": 2,
        "text_embed_2_dim": 6,
        "image_embed_dim": 10,
        "task_type": "t2v",
    },
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp 2": {"tp": 2},
    "pp 2": {"pp": 2},
    "ulysses 2": {"cp": 2},
    "ring 2": {"cp": 2, "ulysses": 1},
    "fsdp 2": {},
}


def case(family: str, layout: str) -> Case:
    rows = "tests.toys.video_rows" if family == "ltx_video" else "tests.toys.image_rows"
    model: dict[str, Any] = {"family": f"tests.toys.drawn_videos.{family}", "config": MODELS[family]}
    if family.startswith("hunyuan"):  # without a norm, the bias of keys moves nothing: its gradient is rounding
        model["freeze"] = ["embed.text.blocks.{*}.qkv.k.bias"]
    model = {"model": model, "data": {"kind": rows, "length": 96}}
    return Case(f"{family}, {layout}", 2, LAYOUTS[layout], model, toy="experts")


# Wan and the joint families have usual layouts in `make test`; these find what video families do in their own way.
@pytest.mark.slow
@pytest.mark.parametrize("family", MODELS)
def test_layouts_train_like_one_process(family: str, tmp_path: Path) -> None:
    train_like_one_process([case(family, layout) for layout in LAYOUTS], tmp_path)
