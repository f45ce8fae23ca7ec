"""HunyuanVideo 1.5: videos from text, or from text and a first frame."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tessera.diffusion.hunyuan_video_1_5.config import HunyuanVideo15Config
from tessera.diffusion.hunyuan_video_1_5.model import HunyuanVideo15Model
from tessera.diffusion.hunyuan_video_1_5.plan import measures, plan, work
from tessera.diffusion.hunyuan_video_1_5.weights import weights
from tessera.diffusion.joint import joint_family

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "quickstart": {
        "num_attention_heads": 4,
        "attention_head_dim": 32,
        "in_channels": 9,
        "out_channels": 4,
        "num_layers": 4,
        "num_refiner_layers": 1,
        "patch_size": 2,
        "text_embed_dim": 64,
        "text_embed_2_dim": 32,
        "image_embed_dim": 32,
        "rope_axes_dim": (8, 12, 12),
        "task_type": "t2v",
    },
    "480p-t2v": {"task_type": "t2v"},
    "480p-i2v": {},
    "720p-t2v": {"task_type": "t2v", "target_size": 960},
    "720p-i2v": {"target_size": 960},
}
SPEC = joint_family(
    "hunyuan_video_1_5",
    HunyuanVideo15Config,
    PRESETS,
    weights,
    build=HunyuanVideo15Model,
    plan=plan,
    work=work,
    measures=measures,
)
