"""CogVideoX: videos from text, or from text and an image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tessera.diffusion.cogvideox.config import CogVideoXConfig
from tessera.diffusion.cogvideox.model import CogVideoXModel
from tessera.diffusion.cogvideox.plan import example, plan, work
from tessera.diffusion.cogvideox.weights import weights
from tessera.diffusion.joint import joint_family

_LARGE = {"num_attention_heads": 48, "num_layers": 42, "use_rotary_positional_embeddings": True}
_IMAGE = {"in_channels": 32}
_V15 = {**_LARGE, "patch_size_t": 2, "patch_bias": False, "sample_frames": 81}
_V15 |= {"sample_height": 300, "sample_width": 300}
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "quickstart": {
        "num_attention_heads": 4,
        "attention_head_dim": 32,
        "in_channels": 4,
        "out_channels": 4,
        "time_embed_dim": 64,
        "text_embed_dim": 64,
        "num_layers": 4,
        "use_rotary_positional_embeddings": True,
    },
    "2b": {},
    "5b": _LARGE,
    "5b-i2v": {**_LARGE, **_IMAGE, "use_learned_positional_embeddings": True},
    "1.5-5b": _V15,
    "1.5-5b-i2v": {**_V15, **_IMAGE, "ofs_embed_dim": 512},
}
SPEC = joint_family(
    "cogvideox",
    CogVideoXConfig,
    PRESETS,
    weights,
    build=CogVideoXModel,
    plan=plan,
    work=work,
    example=example,
)
