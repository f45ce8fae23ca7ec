"""HunyuanVideo: how it may be split over devices, and what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from tessera.core.model_plan import ModelPlan, TensorStyle
from tessera.core.spec import FULL, Training
from tessera.diffusion.cross import BOTH
from tessera.diffusion.hunyuan_video.config import HunyuanConfig, HunyuanVideoConfig
from tessera.diffusion.joint import joint_plan, joint_work
from tessera.models.text.costs import Measures
from tessera.nn.joint_transformer import TIME_FEATURES

_BLOCK = "embed.text.blocks.{*}"
REFINER_STYLES: Mapping[str, TensorStyle] = {
    f"embed.text.embed.{BOTH}": "replicate",
    f"embed.text.{{time,pooled}}.{{up,down}}.{BOTH}": "replicate",
    f"{_BLOCK}.{{attn_norm,mlp_norm,modulation}}.{BOTH}": "replicate",
    f"{_BLOCK}.qkv.{{q,k,v}}.{BOTH}": "column",
    f"{_BLOCK}.out.weight": "row",
    f"{_BLOCK}.out.bias": "replicate",
    f"{_BLOCK}.mlp.up.{BOTH}": "column",
    f"{_BLOCK}.mlp.down.weight": "row",
    f"{_BLOCK}.mlp.down.bias": "replicate",
}


def plan(config: HunyuanVideoConfig) -> ModelPlan:
    conditions = "{time,pooled,guidance}" if config.guidance_embeds else "{time,pooled}"
    return refined_plan(
        config,
        {f"embed.latents.{BOTH}": "replicate", f"embed.{conditions}.{{up,down}}.{BOTH}": "replicate"},
    )


def refined_plan(config: HunyuanConfig, embed: Mapping[str, TensorStyle]) -> ModelPlan:
    """Return the plan of a transformer over latents and refined text. `embed`: styles of its other embeddings."""
    plain = joint_plan(config.shape)
    others = {pattern: style for pattern, style in plain.tensor.items() if not pattern.startswith("embed.")}
    refiner = {f"{_BLOCK}.{name}": config.num_attention_heads for name in ("qkv", "qkv.{q,k,v}")}
    return replace(plain, tensor={**others, **REFINER_STYLES, **embed}, heads={**plain.heads, **refiner})


def work(config: HunyuanConfig, measures: Measures, training: Training) -> np.ndarray:
    """Return the FLOPs of each sample, with those of the refiner, which only text enters."""
    passes, size, width = training.get("embed", FULL), config.hidden_size, config.text_embed_dim
    text, layers = measures.get("refined", measures["text"]).astype(np.float64), config.num_refiner_layers
    refiner: np.ndarray = (
        passes.first * 2 * size * (text * width + TIME_FEATURES + width)
        + passes.weights * 2 * size**2 * (layers * (12 * text + 2) + 2)
        + passes.attention * 4 * size * layers * text**2
    )
    total: np.ndarray = joint_work(replace(config.shape, text_width=0), measures, training) + refiner
    return total
