"""Qwen2.5-VL: Qwen2-VL with window attention in most blocks of the vision encoder and video positions in real time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isqrt
from typing import Any

from tessera.core.batch import Batch, Segments
from tessera.models.family import preset, quickstart_preset, vision_family
from tessera.models.qwen2_5_vl.config import Qwen25VLConfig
from tessera.models.qwen2_5_vl.model import build, costs, plan, window_sizes
from tessera.models.qwen2_5_vl.weights import weights
from tessera.models.qwen2_vl import QUICKSTART_TOKENS
from tessera.models.text.costs import example_with_images

_LONG: dict[str, Any] = {"max_position_embeddings": 128000}
_WIDE_MLP = {"vision": {"intermediate_size": 3456}}  # all that differs in the larger vision encoder
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "quickstart": {
        **quickstart_preset(
            rope_theta=1e4,
            mrope_section=(4, 6, 6),
            max_position_embeddings=4096,
            bos_token_id=None,
            eos_token_id=506,
            pad_token_id=504,
        ),
        "vision": {
            "depth": 3,
            "hidden_size": 96,
            "intermediate_size": 256,
            "num_heads": 4,
            "patch_size": 7,
            "window_size": 28,
            "fullatt_block_indexes": (1,),
        },
        **QUICKSTART_TOKENS,
    },
    "3b": preset(151936, 2048, 11008, 36, (16, 2), tied=True, **_LONG),
    "7b": preset(152064, 3584, 18944, 28, (28, 4), **_LONG),
    "32b": {**preset(152064, 5120, 27648, 64, (40, 8), **_LONG), **_WIDE_MLP},
    "72b": {**preset(152064, 8192, 29568, 80, (64, 8), **_LONG), **_WIDE_MLP},
}


def example(config: Qwen25VLConfig, tokens: int) -> Batch:
    vision = config.vision
    merged = vision.spatial_merge_size**2
    batch = example_with_images(tokens, vision.spatial_merge_size, vision.patch_values)
    windows: list[int] = []
    for patches in batch.segments["vision"].lengths:
        side = isqrt(patches // merged)
        windows += [merged * size for size in window_sizes(side, side, vision.window)]
    return replace(batch, segments={**batch.segments, "vision.windows": Segments.of(windows)})


SPEC = vision_family(
    "qwen2_5_vl",
    Qwen25VLConfig,
    PRESETS,
    build=build,
    plan=plan,
    weights=weights,
    costs=costs,
    example=example,
    processor="Qwen25VLProcessor",
)
