"""Flux.1: images from text, and from text and reference images, which are further tokens (Kontext)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tessera.core.weightmap import WeightMap
from tessera.models.common.joint import CONDITIONS, double_rules, idle_layers, joint_family, plain_rules, single_rules
from tessera.models.flux.config import FluxConfig

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "quickstart": {
        "in_channels": 16,
        "num_layers": 2,
        "num_single_layers": 4,
        "attention_head_dim": 32,
        "num_attention_heads": 4,
        "joint_attention_dim": 64,
        "pooled_projection_dim": 64,
        "axes_dims_rope": (8, 12, 12),
    },
    "dev": {"guidance_embeds": True},  # also Kontext
    "schnell": {},
    "fill": {"guidance_embeds": True, "in_channels": 384, "out_channels": 64},
    "control": {"guidance_embeds": True, "in_channels": 128, "out_channels": 64},  # depth and edges
}
_NAMES = (
    ("embed.latents.{kind}", "x_embedder.{kind}"),
    ("embed.text.{kind}", "context_embedder.{kind}"),
    ("head.proj.{kind}", "proj_out.{kind}"),
    *CONDITIONS,
)


def weights(config: FluxConfig) -> WeightMap:
    """Return the names of diffusers folders."""
    rules = (*plain_rules(_NAMES), *double_rules(), *single_rules(config.shape))
    return WeightMap(rules, idle=idle_layers(config.shape))


SPEC = joint_family("flux", FluxConfig, PRESETS, weights)
