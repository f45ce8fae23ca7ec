"""HunyuanVideo: how it may be split over devices, and what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from tessera.core.batch import Batch
from tessera.core.model_plan import ModelPlan, TensorStyle
from tessera.core.spec import FULL, Training
from tessera.diffusion.hunyuan_video.config import HunyuanConfig, HunyuanVideoConfig
from tessera.diffusion.joint import batch_measures, joint_example, joint_plan, joint_work
from tessera.models.text.costs import Measures
from tessera.nn.joint_transformer import TIME_FEATURES

_BOTH = "{weight,bias}"
_BLOCK = "embed.text.blocks.{*}"
REFINER_STYLES: Mapping[str, TensorStyle] = {
    f"embed.text.embed.{_BOTH}": "replicate",
    f"embed.text.{{time,pooled}}.{{up,down}}.{_BOTH}": "replicate",
    f"{_BLOCK}.{{attn_norm,mlp_norm,modulation}}.{_BOTH}": "replicate",
    f"{_BLOCK}.qkv.{{q,k,v}}.{_BOTH}": "column",
    f"{_BLOCK}.out.weight": "row",
    f"{_BLOCK}.out.bias": "replicate",
    f"{_BLOCK}.mlp.up.{_BOTH}": "column",
    f"{_BLOCK}.mlp.down.weight": "row",
    f"{_BLOCK}.mlp.down.bias": "replicate",
}


def plan(config: HunyuanVideoConfig) -> ModelPlan:
    conditions = "{time,pooled,guidance}" if config.guidance_embeds else "{time,pooled}"
    return refined_plan(
        config,
        {f"embed.latents.{_BOTH}": "replicate", f"embed.{conditions}.{{up,down}}.{_BOTH}": "replicate"},
    )


def refined_plan(config: HunyuanConfig, embed: Mapping[str, TensorStyle]) -> ModelPlan:
    """Return the plan of a transformer over latents and refined text. `embed`: styles of its other embeddings."""
    found = joint_plan(config.shape)
    others = {pattern: style for pattern, style in found.tensor.items() if not pattern.startswith("embed.")}
    refiner = {f"{_BLOCK}.{name}": config.num_attention_heads for name in ("qkv", "qkv.{q,k,v}")}
    return replace(found, tensor={**others, **REFINER_STYLES, **embed}, heads={**found.heads, **refiner})


def refined_work(
    config: HunyuanConfig, measures: Measures, text: np.ndarray, training: Training
) -> dict[str, np.ndarray]:
    """Return the FLOPs of each sample, with those of the refiner, which `text` embeddings of it enter."""
    passes, size, width = training.get("embed", FULL), config.hidden_size, config.text_embed_dim
    text, layers = text.astype(np.float64), config.num_refiner_layers
    refiner = (
        passes.first * 2 * size * (text * width + TIME_FEATURES + width)
        + passes.weights * 2 * size**2 * (layers * (12 * text + 2) + 2)
        + passes.attention * 4 * size * layers * text**2
    )
    rest = replace(config.shape, text_width=0)
    return {"latents": joint_work(rest, measures, training)["latents"] + refiner}


def work(
    config: HunyuanVideoConfig, measures: Measures, training: Training = MappingProxyType({})
) -> dict[str, np.ndarray]:
    return refined_work(config, measures, measures["text"], training)


def flops(config: HunyuanVideoConfig, batch: Batch, training: Training = MappingProxyType({})) -> float:
    return float(work(config, batch_measures(batch), training)["latents"].sum())


def example(config: HunyuanVideoConfig, tokens: int) -> Batch:
    return joint_example(config.shape, tokens)
