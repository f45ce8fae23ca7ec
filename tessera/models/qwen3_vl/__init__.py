"""Qwen3-VL, dense and with experts: DeepStack features, and the time of video frames written as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tessera.models.family import QUICKSTART_VISION, experts, preset
from tessera.models.qwen2_vl import quickstart
from tessera.models.qwen3_vl.model import Qwen3VL

# The vision encoder of small models. Larger models use the defaults of the configuration.
_SMALL_TOWER = {
    "vision": {
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "deepstack_visual_indexes": (5, 11, 17),
    }
}
QUICKSTART_TOWER = {
    **QUICKSTART_VISION,
    "patch_size": 8,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": (0, 1),
}


def _quickstart(experts: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return quickstart(QUICKSTART_TOWER, head_dim=32, mrope_section=(6, 5, 5), experts=experts)


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "quickstart": _quickstart(),
    "quickstart-moe": _quickstart(experts(8, 2, 96)),
    "2b": {**preset(151936, 2048, 6144, 28, (16, 8), tied=True), **_SMALL_TOWER},
    "4b": {**preset(151936, 2560, 9728, 36, (32, 8), tied=True), **_SMALL_TOWER},
    "8b": preset(151936, 4096, 12288, 36, (32, 8)),
    "32b": preset(151936, 5120, 25600, 64, (64, 8)),
    "30b-a3b": preset(151936, 2048, 6144, 48, (32, 4), experts=experts(128, 8, 768)),
    "235b-a22b": preset(151936, 4096, 12288, 94, (64, 4), experts=experts(128, 8, 1536)),
}
SPEC = Qwen3VL().spec(PRESETS)
