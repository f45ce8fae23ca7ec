"""Wan 2.1 and 2.2: videos from text, from a first frame, and from a first and a last frame."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tessera.core.model_plan import ModelPlan
from tessera.diffusion.cross import cross_family, cross_plan
from tessera.diffusion.plan import BOTH
from tessera.diffusion.wan.config import WanConfig
from tessera.diffusion.wan.model import WanModel
from tessera.diffusion.wan.weights import MODEL_TYPES, hf_config, original, weights

_SMALL = {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}  # diffusers' defaults describe the 14B model
_IMAGES = {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120}
PRESETS: Mapping[str, Mapping[str, Any]] = {
    # A preset for the small VAE (4 channels) and text encoder (64 features) of the quick start.
    "quickstart": {
        "num_attention_heads": 4,
        "attention_head_dim": 32,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 64,
        "freq_dim": 64,
        "ffn_dim": 384,
        "num_layers": 4,
    },
    "2.1-t2v-1.3b": _SMALL,
    "2.1-t2v-14b": {},
    "2.1-i2v-14b": _IMAGES,
    "2.1-flf2v-14b": {**_IMAGES, "pos_embed_seq_len": 514},
    "2.2-t2v-a14b": {},  # both experts of this model have this shape
    "2.2-i2v-a14b": {"in_channels": 36},
    "2.2-ti2v-5b": {
        "num_attention_heads": 24,
        "ffn_dim": 14336,
        "num_layers": 30,
        "in_channels": 48,
        "out_channels": 48,
    },
}


def plan(config: WanConfig) -> ModelPlan:
    """Return the parallel plan. Modules that the published code computes in float32 are listed in it."""
    wide = ["embed.time", "blocks.{*}.modulation", "head.modulation"]
    wide += ["blocks.{*}.cross_norm"] if config.cross_attn_norm else []
    wide += ["embed.image.{norm_in,norm_out}"] if config.image_dim is not None else []
    image_tensors = ("{norm_in,norm_out}." + BOTH, "mlp.{up,down}." + BOTH, "positions")
    return cross_plan(
        config.shape,
        embed=config.patch_values * config.hidden,
        styles={f"embed.image.{name}": "replicate" for name in image_tensors},
        float32=tuple(wide),
    )


SPEC = cross_family(
    "wan",
    WanConfig,
    PRESETS,
    build=WanModel,
    plan=plan,
    weights=weights,
    original=original,
    originals=dict.fromkeys(MODEL_TYPES, hf_config),
)
