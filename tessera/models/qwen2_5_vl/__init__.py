"""Qwen2.5-VL: Qwen2-VL with window attention in most blocks of the vision encoder and video positions in real time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tessera.models.family import QUICKSTART_VISION, preset
from tessera.models.qwen2_5_vl.model import Qwen25VL
from tessera.models.qwen2_vl import quickstart

_LONG: dict[str, Any] = {"max_position_embeddings": 128000}
_WIDE_MLP = {"vision": {"intermediate_size": 3456}}  # the only difference of the vision encoder in larger models
SMALL_TOWER = {**QUICKSTART_VISION, "patch_size": 7, "window_size": 28, "fullatt_block_indexes": (1,)}
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "quickstart": quickstart(SMALL_TOWER, mrope_section=(4, 6, 6)),
    "3b": preset(151936, 2048, 11008, 36, (16, 2), tied=True, **_LONG),
    "7b": preset(152064, 3584, 18944, 28, (28, 4), **_LONG),
    "32b": {**preset(152064, 5120, 27648, 64, (40, 8), **_LONG), **_WIDE_MLP},
    "72b": {**preset(152064, 8192, 29568, 80, (64, 8), **_LONG), **_WIDE_MLP},
}
SPEC = Qwen25VL().spec(PRESETS)
