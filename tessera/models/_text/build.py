"""A text tower and its head from their numbers."""

from __future__ import annotations

from torch import nn

from tessera.models._text.config import RopeScaling, TextConfig
from tessera.nn.decoder import DecoderShape, TextDecoder
from tessera.nn.embedding import TiedHead
from tessera.nn.moe import MoE, MoEShape
from tessera.ops.rope import FrequencyScaling, LinearScaling, Rope, Scaling, YarnScaling, yarn_attention


def build_text(text: TextConfig, attention: str) -> TextDecoder:
    return TextDecoder(text_shape(text, attention), mlp=lambda layer: _experts(text, layer))


def build_head(tower: TextDecoder, tied: bool) -> nn.Module:
    return TiedHead(tower.embed) if tied else nn.Linear(tower.shape.hidden, tower.shape.vocab, bias=False)


def text_shape(text: TextConfig, attention: str) -> DecoderShape:
    return DecoderShape(
        vocab=text.vocab_size,
        hidden=text.hidden_size,
        intermediate=text.intermediate_size,
        layers=text.num_hidden_layers,
        heads=text.num_attention_heads,
        kv_heads=text.num_key_value_heads,
        head_dim=text.head_size,
        norm_eps=text.rms_norm_eps,
        rope=Rope(
            dim=text.rotary_dim,
            theta=text.rope_theta,
            sections=text.mrope_section or (),
            interleaved=text.mrope_interleaved,
            scaling=_scaling(text.rope_scaling),
        ),
        qkv_bias=text.attention_bias,
        qk_norm=text.qk_norm,
        sandwich_norm=text.sandwich_norm,
        attention=attention,
    )


def _scaling(told: RopeScaling | None) -> Scaling | None:
    if told is None or told.rope_type == "dynamic":
        return None  # up to `max_position_embeddings` dynamic ones are as they are, and nothing is longer
    if told.rope_type == "linear":
        return LinearScaling(told.factor)
    original = told.original_max_position_embeddings
    if told.rope_type == "llama3":
        return FrequencyScaling(told.factor, told.low_freq_factor, told.high_freq_factor, original)
    sharper = told.attention_factor or yarn_attention(told.factor, told.mscale, told.mscale_all_dim)
    return YarnScaling(told.factor, told.beta_fast, told.beta_slow, original, sharper, told.truncate)


def _experts(text: TextConfig, layer: int) -> MoE | None:
    experts = text.experts_in(layer)
    if experts is None:
        return None
    return MoE(
        MoEShape(
            hidden=text.hidden_size,
            intermediate=experts.moe_intermediate_size,
            experts=experts.num_experts,
            top_k=experts.num_experts_per_tok,
            normalize=experts.norm_topk_prob,
            balance=experts.router_aux_loss_coef if experts.output_router_logits else 0.0,
        )
    )
