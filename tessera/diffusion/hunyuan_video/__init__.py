"""HunyuanVideo: videos from text, or from text and a first frame."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tessera.diffusion.hunyuan_video.config import HunyuanVideoConfig
from tessera.diffusion.hunyuan_video.model import HunyuanVideoModel
from tessera.diffusion.hunyuan_video.weights import original, weights, work
from tessera.diffusion.joint import joint_family

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "quickstart": {
        "num_attention_heads": 4,
        "attention_head_dim": 32,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 2,
        "num_single_layers": 4,
        "num_refiner_layers": 1,
        "text_embed_dim": 64,
        "pooled_projection_dim": 64,
        "rope_axes_dim": (8, 12, 12),
    },
    "13b": {},
    "13b-i2v": {"image_condition_type": "token_replace"},
    "13b-i2v-33ch": {"image_condition_type": "latent_concat", "in_channels": 33, "guidance_embeds": False},
}
SPEC = joint_family(
    "hunyuan_video",
    HunyuanVideoConfig,
    PRESETS,
    weights,
    original,
    build=HunyuanVideoModel,
    work=work,
)
