"""Wan: how it may be split over devices, and what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from types import MappingProxyType

import numpy as np

from tessera.core.batch import Batch
from tessera.core.model_plan import ModelPlan, PipelineUnit, StageActivation, TensorStyle
from tessera.core.spec import Training
from tessera.diffusion.costs import LATENTS, CrossCosts, cross_example, cross_flops, cross_work
from tessera.diffusion.wan.config import WanConfig
from tessera.models.text.costs import Measures
from tessera.nn.stage_carry import CARRY

_BOTH = "{weight,bias}"
_IMAGE_EMBEDS = 257  # of one image


def plan(config: WanConfig) -> ModelPlan:
    cost = costs(config)
    carry = StageActivation(CARRY, config.hidden)
    heads = config.num_attention_heads
    projections = ("attn.qkv", "attn.qkv.{q,k,v}", "cross.q", "cross.kv.{k,v}", "cross.image_kv.{k,v}")
    return ModelPlan(
        blocks=("blocks.{*}",),
        tensor=_styles(config),
        units=(
            PipelineUnit("embed", cost.embed / cost.block),
            PipelineUnit("blocks.{*}", 1.0, "latents", carry),
            PipelineUnit("head", cost.head / cost.block),
        ),
        streams={"latents": LATENTS},
        attention=("blocks.{*}.attn.core",),
        float32=_float32(config),
        heads={f"blocks.{{*}}.{name}": heads for name in projections},
    )


def _float32(config: WanConfig) -> tuple[str, ...]:
    """Return what the published code keeps in float32: time, tables of modulation, layer norms."""
    found = ["embed.time", "blocks.{*}.modulation", "head.modulation"]
    found += ["blocks.{*}.cross_norm"] if config.cross_attn_norm else []
    return (*found, "embed.image.{norm_in,norm_out}") if config.image_dim is not None else tuple(found)


def _styles(config: WanConfig) -> dict[str, TensorStyle]:
    """Return the tensor-parallel style of every parameter."""
    styles: dict[str, TensorStyle] = {
        f"embed.{{patch,modulation}}.{_BOTH}": "replicate",
        f"embed.{{time,text}}.{{up,down}}.{_BOTH}": "replicate",
        "blocks.{*}.modulation.table": "replicate",
        f"blocks.{{*}}.attn.qkv.{{q,k,v}}.{_BOTH}": "column",
        f"blocks.{{*}}.cross.q.{_BOTH}": "column",
        f"blocks.{{*}}.cross.kv.{{k,v}}.{_BOTH}": "column",
        "blocks.{*}.{attn,cross}.{q_norm,k_norm}.weight": "features",
        "blocks.{*}.{attn,cross}.out.weight": "row",
        "blocks.{*}.{attn,cross}.out.bias": "replicate",
        f"blocks.{{*}}.mlp.up.{_BOTH}": "column",
        "blocks.{*}.mlp.down.weight": "row",
        "blocks.{*}.mlp.down.bias": "replicate",
        "head.modulation.table": "replicate",
        f"head.proj.{_BOTH}": "replicate",
    }
    if config.cross_attn_norm:
        styles[f"blocks.{{*}}.cross_norm.{_BOTH}"] = "replicate"
    if config.image_dim is not None:
        styles[f"embed.image.{{norm_in,norm_out}}.{_BOTH}"] = "replicate"
        styles[f"embed.image.mlp.{{up,down}}.{_BOTH}"] = "replicate"
        styles[f"blocks.{{*}}.cross.image_kv.{{k,v}}.{_BOTH}"] = "column"
        styles["blocks.{*}.cross.image_norm.weight"] = "features"
    if config.pos_embed_seq_len is not None:
        styles["embed.image.positions"] = "replicate"
    return styles


def costs(config: WanConfig) -> CrossCosts:
    square, image = config.hidden**2, config.image_dim or 0
    return CrossCosts(
        width=config.hidden,
        layers=config.num_layers,
        block=6 * square + 2 * config.hidden * config.ffn_dim,
        text_block=2 * square,
        embed=config.patch_values * config.hidden,
        text=(config.text_dim * config.hidden, square),
        time=(config.freq_dim * config.hidden, 7 * square),
        head=config.hidden * config.out_channels * prod(config.patch_size),
        image=image * (image + config.hidden),
    )


def flops(config: WanConfig, batch: Batch, training: Training = MappingProxyType({})) -> float:
    return cross_flops(costs(config), batch, training)


def work(config: WanConfig, measures: Measures, training: Training = MappingProxyType({})) -> dict[str, np.ndarray]:
    """Return the FLOPs of each sample, for balance."""
    images = np.full_like(measures["text"], _image_embeds(config))
    return cross_work(costs(config), {**measures, "image_embeds": images}, training)


def _image_embeds(config: WanConfig) -> int:
    """Return how many image embeddings a sample has."""
    return 0 if config.image_dim is None else config.pos_embed_seq_len or _IMAGE_EMBEDS


def example(config: WanConfig, tokens: int) -> Batch:
    images: Mapping[str, tuple[int, int]] = {}
    if config.image_dim is not None:
        images = {"image_embeds": (_image_embeds(config), config.image_dim)}
    return cross_example(tokens, config.patch_values, config.text_dim, **images)
