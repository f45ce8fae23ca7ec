"""Tiny text decoders, as the configurations of families spell them."""

from __future__ import annotations

from typing import Any

VOCAB = 80


def text(layers: int, heads: int, kv_heads: int, head: int, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": heads * head if "head_dim" not in more else 24,
        "intermediate_size": 40,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "eos_token_id": 1,
        **more,
    }


def experts_of(count: int, chosen: int, **more: Any) -> dict[str, Any]:
    """Without the balance loss, which nobody asks for here (`output_router_logits`)."""
    return {
        "num_experts": count,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": 12,
        **more,
    }
