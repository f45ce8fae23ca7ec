"""How a text tower may be dealt out over devices."""

from __future__ import annotations

from tessera.core.types import Carry, Stage, TensorStyle
from tessera.models._text.config import TextConfig

ATTENTION = "text.layers.{*}.attn.core"
BLOCKS = "text.layers.{*}"


def text_styles(text: TextConfig, tied: bool) -> dict[str, TensorStyle]:
    styles: dict[str, TensorStyle] = {
        "text.embed.weight": "vocab",
        "text.layers.{*}.{attn_norm,mlp_norm}.weight": "sequence",
        "text.layers.{*}.attn.{q,k,v}.{weight,bias}": "column",
        "text.layers.{*}.attn.o.weight": "row",
        "text.norm.weight": "sequence",
    }
    if text.qk_norm:
        styles["text.layers.{*}.attn.{q_norm,k_norm}.weight"] = "heads"
    if text.sandwich_norm:
        styles["text.layers.{*}.{attn_out_norm,mlp_out_norm}.weight"] = "sequence"
    if any(text.experts_in(layer) is None for layer in range(text.num_hidden_layers)):
        styles["text.layers.{*}.mlp.{gate,up}.weight"] = "column"
        styles["text.layers.{*}.mlp.down.weight"] = "row"
    if text.experts is not None:
        styles["text.layers.{*}.mlp.router.weight"] = "sequence"
        styles["text.layers.{*}.mlp.experts.{gate,up}"] = "column"
        styles["text.layers.{*}.mlp.experts.down"] = "row"
    return styles if tied else {**styles, "head.weight": "vocab"}


def text_experts(text: TextConfig) -> tuple[str, ...]:
    return () if text.experts is None else ("text.layers.{*}.mlp.experts",)


def text_heads(text: TextConfig) -> dict[str, int]:
    return {
        "text.layers.{*}.attn.q": text.num_attention_heads,
        "text.layers.{*}.attn.{k,v}": text.num_key_value_heads,
    }


def layer_weights(text: TextConfig) -> float:
    """Weights that a token meets in one layer, on average over the layers: what costs are counted in."""
    attention = 2 * text.hidden_size * text.head_size * (text.num_attention_heads + text.num_key_value_heads)
    mlps = 0
    for layer in range(text.num_hidden_layers):
        experts = text.experts_in(layer)
        width = text.intermediate_size
        if experts is not None:
            width = experts.num_experts_per_tok * experts.moe_intermediate_size
        mlps += 3 * text.hidden_size * width
    return attention + mlps / text.num_hidden_layers


def text_stages(text: TextConfig, whole: int = 0) -> tuple[Stage, ...]:
    """`whole`: so many layers at the beginning belong together, since something else than tokens goes into them."""
    carry = Carry(1, text.hidden_size)
    first = tuple(Stage(f"text.layers.{{{n}}}", 1.0, "text", carry if n == whole - 1 else None) for n in range(whole))
    rest = f"text.layers.{{{whole}-{text.num_hidden_layers - 1}}}" if whole else "text.layers.{*}"
    others = (Stage(rest, 1.0, "text", carry),) if whole < text.num_hidden_layers else ()
    return (
        Stage("text.embed", 0.0, carry=None if whole else carry),
        *first,
        *others,
        Stage("text.norm", 0.0),
        Stage("head", text.hidden_size * text.vocab_size / layer_weights(text)),
    )
