"""Wan: how it may be split over devices."""

from __future__ import annotations

from tessera.core.model_plan import ModelPlan, TensorStyle
from tessera.diffusion.cross import BOTH, cross_plan
from tessera.diffusion.wan.config import WanConfig

_HEADS = ("attn.qkv", "attn.qkv.{q,k,v}", "cross.q", "cross.kv.{k,v}", "cross.image_kv.{k,v}")


def plan(config: WanConfig) -> ModelPlan:
    shape = config.shape
    return cross_plan(
        shape,
        _styles(config),
        dict.fromkeys(_HEADS, config.num_attention_heads),
        embed=shape.latent_values * shape.width,
        float32=_float32(config),
    )


def _float32(config: WanConfig) -> tuple[str, ...]:
    """Return the modules that the published code computes in float32: time, tables of modulation, layer norms."""
    modules = ["embed.time", "blocks.{*}.modulation", "head.modulation"]
    modules += ["blocks.{*}.cross_norm"] if config.cross_attn_norm else []
    return (*modules, "embed.image.{norm_in,norm_out}") if config.image_dim is not None else tuple(modules)


def _styles(config: WanConfig) -> dict[str, TensorStyle]:
    """Return the tensor-parallel styles of parameters that not every family with cross attention has."""
    styles: dict[str, TensorStyle] = {
        f"blocks.{{*}}.attn.qkv.{{q,k,v}}.{BOTH}": "column",
        "blocks.{*}.attn.{q_norm,k_norm}.weight": "features",
        "blocks.{*}.attn.out.weight": "row",
        "blocks.{*}.attn.out.bias": "replicate",
    }
    if config.cross_attn_norm:
        styles[f"blocks.{{*}}.cross_norm.{BOTH}"] = "replicate"
    if config.image_dim is not None:
        styles[f"embed.image.{{norm_in,norm_out}}.{BOTH}"] = "replicate"
        styles[f"embed.image.mlp.{{up,down}}.{BOTH}"] = "replicate"
        styles[f"blocks.{{*}}.cross.image_kv.{{k,v}}.{BOTH}"] = "column"
        styles["blocks.{*}.cross.image_norm.weight"] = "features"
    if config.pos_embed_seq_len is not None:
        styles["embed.image.positions"] = "replicate"
    return styles
