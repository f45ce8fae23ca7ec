"""A family of text decoders whose MLPs are mixtures of experts, in one folder and nowhere else."""

from __future__ import annotations

import torch
from torch import nn

from tessera.config.reader import Section
from tessera.core.batch import Batch, Segments
from tessera.core.model_plan import ModelPlan, PipelineUnit, StageActivation, TensorStyle
from tessera.core.outputs import LANGUAGE_OUTPUTS
from tessera.core.spec import Component, ModelSpec
from tessera.models.text.decoder import TEXT_STREAM
from tessera.nn.causal_lm import LanguageModel
from tessera.nn.decoder import DecoderShape, GatedMLP, TextDecoder
from tessera.nn.layers import TiedHead
from tessera.nn.moe import MoE, MoEShape
from tessera.ops.pointwise import Rope


class MoEDecoderConfig(Section):
    vocab: int = 64
    hidden: int = 32
    intermediate: int = 48  # of dense layers, which come first
    layers: int = 2
    dense_layers: int = 0
    heads: int = 4
    kv_heads: int = 2
    experts: int = 4
    expert_width: int = 16
    top_k: int = 2
    shared_width: int = 24  # 0: no shared expert
    normalize: bool = True
    balance: float = 0.1
    tied: bool = False
    initializer_range: float = 0.2
    implementation: str = "auto"


def build(config: MoEDecoderConfig) -> LanguageModel:
    text = TextDecoder(
        DecoderShape(
            vocab=config.vocab,
            hidden=config.hidden,
            intermediate=config.intermediate,
            layers=config.layers,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.hidden // config.heads,
            norm_eps=1e-6,
            rope=Rope(config.hidden // config.heads, 1e4),
            qk_norm=True,
        ),
        mlp=lambda layer: None if layer < config.dense_layers else _experts(config),
    )
    head = TiedHead(text.embed) if config.tied else nn.Linear(config.hidden, config.vocab, bias=False)
    return LanguageModel(text, head, config.initializer_range)


def _experts(config: MoEDecoderConfig) -> MoE:
    shape = MoEShape(
        hidden=config.hidden,
        intermediate=config.expert_width,
        experts=config.experts,
        top_k=config.top_k,
        normalize=config.normalize,
        balance=config.balance,
        implementation=config.implementation,
    )
    return MoE(shape, GatedMLP(config.hidden, config.shared_width) if config.shared_width else None)


def plan(config: MoEDecoderConfig) -> ModelPlan:
    styles: dict[str, TensorStyle] = {
        "text.embed.weight": "vocab",
        "text.layers.{*}.{attn_norm,mlp_norm}.weight": "sequence",
        "text.layers.{*}.attn.{q,k,v}.weight": "column",
        "text.layers.{*}.attn.{q_norm,k_norm}.weight": "heads",
        "text.layers.{*}.attn.o.weight": "row",
        "text.norm.weight": "sequence",
    }
    sparse, dense = f"text.layers.{{{config.dense_layers}-{config.layers - 1}}}.mlp", "text.layers.{*}.mlp"
    styles[f"{sparse}.router.weight"] = "sequence"
    styles[f"{sparse}.experts.{{gate,up}}"] = "column"
    styles[f"{sparse}.experts.down"] = "row"
    if config.dense_layers:
        styles[f"{dense}.{{gate,up}}.weight"] = "column"
        styles[f"{dense}.down.weight"] = "row"
    if config.shared_width:
        styles[f"{sparse}.shared.{{gate,up}}.weight"] = "column"
        styles[f"{sparse}.shared.down.weight"] = "row"
    if not config.tied:
        styles["head.weight"] = "vocab"
    carry = StageActivation(1, config.hidden)
    return ModelPlan(
        blocks=("text.layers.{*}",),
        tensor=styles,
        units=(
            PipelineUnit("text.embed", 0.0, output=carry),
            PipelineUnit("text.layers.{*}", 1.0, "text", carry),
            PipelineUnit("text.norm", 0.0),
            PipelineUnit("head", 0.5),
        ),
        streams={"text": TEXT_STREAM},
        experts=(f"{sparse}.experts",),
        attention=("text.layers.{*}.attn.core",),
        heads={"text.layers.{*}.attn.q": config.heads, "text.layers.{*}.attn.{k,v}": config.kv_heads},
        fsdp_root=("text.embed", "head"),
        tied={"head": "text.embed"} if config.tied else {},
    )


def example(config: MoEDecoderConfig, tokens: int) -> Batch:
    """One row of one sample."""
    words = torch.zeros(tokens, dtype=torch.int64)
    return Batch(
        {"tokens": words, "labels": words, "positions": torch.arange(tokens)},
        {"text": Segments.of([tokens])},
        counts={"tokens": tokens},
        seeds=(0,),
    )


SPEC = ModelSpec(
    name="moe_decoder",
    config=MoEDecoderConfig,
    main=Component(build=build, plan=plan),
    presets={"tiny": {}},
    example=example,
    outputs=LANGUAGE_OUTPUTS,
)
