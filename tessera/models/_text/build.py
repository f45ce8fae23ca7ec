"""A text tower and its head from their numbers."""

from __future__ import annotations

from torch import nn

from tessera.models._text.config import TextConfig
from tessera.nn.decoder import DecoderShape, TextDecoder
from tessera.nn.embedding import TiedHead
from tessera.nn.moe import MoE, MoEShape
from tessera.ops.rope import FrequencyScaling, Rope


def build_text(text: TextConfig, attention: str) -> TextDecoder:
    return TextDecoder(text_shape(text, attention), mlp=lambda layer: _experts(text, layer))


def build_head(tower: TextDecoder, tied: bool) -> nn.Module:
    return TiedHead(tower.embed) if tied else nn.Linear(tower.shape.hidden, tower.shape.vocab, bias=False)


def text_shape(text: TextConfig, attention: str) -> DecoderShape:
    scaling = text.rope_scaling
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
            scaling=None
            if scaling is None
            else FrequencyScaling(
                scaling.factor,
                scaling.low_freq_factor,
                scaling.high_freq_factor,
                scaling.original_max_position_embeddings,
            ),
        ),
        qkv_bias=text.attention_bias,
        qk_norm=text.qk_norm,
        sandwich_norm=text.sandwich_norm,
        attention=attention,
    )


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
