"""Qwen-Image: images from text, and from text and reference images, which are additional tokens (Edit)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tessera.diffusion.joint import CONDITIONS, DOUBLE_ATTENTION, double_rules, idle_layers, joint_family, plain_rules
from tessera.diffusion.qwen_image.config import QwenImageConfig
from tessera.weights.map import WeightMap

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "quickstart": {
        "in_channels": 16,
        "out_channels": 4,
        "num_layers": 4,
        "attention_head_dim": 32,
        "num_attention_heads": 4,
        "joint_attention_dim": 64,
        "axes_dims_rope": (8, 12, 12),
    },
    "20b": {},  # Edit and Edit-2509 have the same shape
    "edit-2511-20b": {"zero_cond_t": True},
}
_NAMES = (
    ("embed.latents.{kind}", "img_in.{kind}"),
    ("embed.text_norm.weight", "txt_norm.weight"),
    ("embed.text.{kind}", "txt_in.{kind}"),
    ("head.proj.{kind}", "proj_out.{kind}"),
    *CONDITIONS,
)
_BLOCKS = (
    *DOUBLE_ATTENTION,
    ("latent_modulation.{kind}", "img_mod.1.{kind}"),
    ("text_modulation.{kind}", "txt_mod.1.{kind}"),
    ("latent_mlp.up.{kind}", "img_mlp.net.0.proj.{kind}"),
    ("latent_mlp.down.{kind}", "img_mlp.net.2.{kind}"),
    ("text_mlp.up.{kind}", "txt_mlp.net.0.proj.{kind}"),
    ("text_mlp.down.{kind}", "txt_mlp.net.2.{kind}"),
)


def weights(config: QwenImageConfig) -> WeightMap:
    """Return the parameter names in diffusers folders."""
    return WeightMap((*plain_rules(_NAMES), *double_rules(_BLOCKS)), idle=idle_layers(config.shape))


# The authors published the original weights as a diffusers folder. So both formats have the same tensor names.
SPEC = joint_family("qwen_image", QwenImageConfig, PRESETS, weights, weights)
