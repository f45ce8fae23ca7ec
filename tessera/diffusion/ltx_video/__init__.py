"""LTX-Video: videos from strongly compressed latents, with or without given frames."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tessera.diffusion.cross import cross_family
from tessera.diffusion.ltx_video.config import LTXVideoConfig
from tessera.diffusion.ltx_video.model import LTXVideoModel
from tessera.diffusion.ltx_video.plan import plan
from tessera.diffusion.ltx_video.weights import original, weights

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "quickstart": {
        "num_attention_heads": 4,
        "attention_head_dim": 32,
        "cross_attention_dim": 128,
        "in_channels": 4,
        "out_channels": 4,
        "caption_channels": 64,
        "num_layers": 4,
    },
    "2b": {},
    "13b": {"num_layers": 48, "attention_head_dim": 128, "cross_attention_dim": 4096, "coordinates": "frames"},
}
SPEC = cross_family(
    "ltx_video", LTXVideoConfig, PRESETS, build=LTXVideoModel, plan=plan, weights=weights, original=original
)
