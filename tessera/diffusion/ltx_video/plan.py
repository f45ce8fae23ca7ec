"""LTX-Video: how it may be split over devices, and what it costs."""

from __future__ import annotations

from types import MappingProxyType

import numpy as np

from tessera.core.batch import Batch
from tessera.core.model_plan import ModelPlan, PipelineUnit, StageActivation, TensorStyle
from tessera.core.spec import Training
from tessera.diffusion.costs import LATENTS, CrossCosts, cross_example, cross_flops, cross_work
from tessera.diffusion.ltx_video.config import LTXVideoConfig
from tessera.diffusion.ltx_video.model import TIME_FEATURES
from tessera.models.text.costs import Measures
from tessera.nn.stage_carry import CARRY

_BOTH = "{weight,bias}"
# Every head is rotated by angles of its own, so ranks do not split the heads of attention among latents.
_STYLES: dict[str, TensorStyle] = {
    f"embed.{{patch,modulation}}.{_BOTH}": "replicate",
    f"embed.{{time,text}}.{{up,down}}.{_BOTH}": "replicate",
    "blocks.{*}.modulation.table": "replicate",
    f"blocks.{{*}}.attn.qkv.{{q,k,v}}.{_BOTH}": "replicate",
    "blocks.{*}.attn.{q_norm,k_norm}.weight": "replicate",
    f"blocks.{{*}}.attn.out.{_BOTH}": "replicate",
    f"blocks.{{*}}.cross.q.{_BOTH}": "column",
    f"blocks.{{*}}.cross.kv.{{k,v}}.{_BOTH}": "column",
    "blocks.{*}.cross.{q_norm,k_norm}.weight": "features",
    "blocks.{*}.cross.out.weight": "row",
    "blocks.{*}.cross.out.bias": "replicate",
    f"blocks.{{*}}.mlp.up.{_BOTH}": "column",
    "blocks.{*}.mlp.down.weight": "row",
    "blocks.{*}.mlp.down.bias": "replicate",
    "head.modulation.table": "replicate",
    f"head.proj.{_BOTH}": "replicate",
}


def plan(config: LTXVideoConfig) -> ModelPlan:
    cost = costs(config)
    return ModelPlan(
        blocks=("blocks.{*}",),
        tensor=_STYLES,
        units=(
            PipelineUnit("embed", (cost.embed + sum(cost.text)) / cost.block),
            PipelineUnit("blocks.{*}", 1.0, "latents", StageActivation(CARRY, config.hidden_size)),
            PipelineUnit("head", cost.head / cost.block),
        ),
        streams={"latents": LATENTS},
        attention=("blocks.{*}.attn.core",),
        heads={f"blocks.{{*}}.cross.{name}": config.num_attention_heads for name in ("q", "kv", "kv.{k,v}")},
    )


def costs(config: LTXVideoConfig) -> CrossCosts:
    size = config.hidden_size
    square = size**2
    return CrossCosts(
        width=size,
        layers=config.num_layers,
        block=14 * square,
        text_block=2 * square,
        embed=config.in_channels * size,
        text=(config.caption_channels * size, square),
        time=(TIME_FEATURES * size, 7 * square),
        head=config.predicted * size,
    )


def flops(config: LTXVideoConfig, batch: Batch, training: Training = MappingProxyType({})) -> float:
    return cross_flops(costs(config), batch, training)


def work(
    config: LTXVideoConfig, measures: Measures, training: Training = MappingProxyType({})
) -> dict[str, np.ndarray]:
    """Return the FLOPs of each sample, for balance."""
    return cross_work(costs(config), measures, training)


def example(config: LTXVideoConfig, tokens: int) -> Batch:
    return cross_example(tokens, config.in_channels, config.caption_channels)
