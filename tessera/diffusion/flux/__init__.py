"""Flux.1: images from text, and from text and reference images, which are additional tokens (Kontext)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tessera.diffusion.flux.config import FluxConfig
from tessera.diffusion.joint import (
    CONDITIONS,
    double_rules,
    idle_layers,
    joint_family,
    original_rules,
    plain_rules,
    single_rules,
)
from tessera.weights.map import WeightMap

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
    "dev": {"guidance_embeds": True},  # also the shape of FLUX.1-Kontext-dev
    "schnell": {},
    "fill": {"guidance_embeds": True, "in_channels": 384, "out_channels": 64},
    # a model that gets depth or edges as conditions
    "control": {"guidance_embeds": True, "in_channels": 128, "out_channels": 64},
}
_NAMES = (
    ("embed.latents.{kind}", "x_embedder.{kind}"),
    ("embed.text.{kind}", "context_embedder.{kind}"),
    ("head.proj.{kind}", "proj_out.{kind}"),
    *CONDITIONS,
)


def weights(config: FluxConfig) -> WeightMap:
    """Return the parameter names in diffusers folders."""
    rules = (*plain_rules(_NAMES), *double_rules(), *single_rules(config.shape))
    return WeightMap(rules, idle=idle_layers(config.shape))


# (parameter name in Tessera, parameter name in the original checkpoint).
_ORIGINAL = (
    ("embed.latents.{kind}", "img_in.{kind}"),
    ("embed.text.{kind}", "txt_in.{kind}"),
    *(
        (f"embed.{ours}.{side}.{{kind}}", f"{theirs}_in.{layer}_layer.{{kind}}")
        for ours, theirs in (("time", "time"), ("guidance", "guidance"), ("pooled", "vector"))
        for side, layer in (("up", "in"), ("down", "out"))
    ),
    ("head.proj.{kind}", "final_layer.linear.{kind}"),
    *(
        (f"blocks.{{i}}.{ours}{native}", f"double_blocks.{{i}}.{theirs}{foreign}")
        for ours, theirs in (("latent", "img"), ("text", "txt"))
        for native, foreign in (
            ("_modulation.{kind}", "_mod.lin.{kind}"),
            ("_mlp.up.{kind}", "_mlp.0.{kind}"),
            ("_mlp.down.{kind}", "_mlp.2.{kind}"),
        )
    ),
    *(
        (f"blocks.{{i}}.attn.{ours}{native}", f"double_blocks.{{i}}.{theirs}_attn.{foreign}")
        for ours, theirs in (("latent", "img"), ("text", "txt"))
        for native, foreign in (
            ("_norm.q.weight", "norm.query_norm.scale"),
            ("_norm.k.weight", "norm.key_norm.scale"),
            ("_out.{kind}", "proj.{kind}"),
        )
    ),
    ("single_blocks.{i}.modulation.{kind}", "single_blocks.{i}.modulation.lin.{kind}"),
    ("single_blocks.{i}.norm.q.weight", "single_blocks.{i}.norm.query_norm.scale"),
    ("single_blocks.{i}.norm.k.weight", "single_blocks.{i}.norm.key_norm.scale"),
    ("single_blocks.{i}.out.bias", "single_blocks.{i}.linear2.bias"),
)


def original(config: FluxConfig) -> WeightMap:
    """Return the parameter names and shapes in original checkpoints, where queries, keys and values are one layer."""
    rules = (*plain_rules(_ORIGINAL), *original_rules(config.shape, "attn.qkv"))
    return WeightMap(rules, idle=idle_layers(config.shape), mark="img_in.weight")


SPEC = joint_family("flux", FluxConfig, PRESETS, weights, original)
