"""How Qwen2-VL may be dealt out over devices."""

from __future__ import annotations

from tessera.core.types import Carry, ModelPlan, Stage, TensorStyle
from tessera.models.qwen2_vl.config import Qwen2VLConfig

_TEXT: dict[str, TensorStyle] = {
    "text.embed.weight": "vocab",
    "text.layers.{*}.attn_norm.weight": "sequence",
    "text.layers.{*}.attn.{q,k,v}.{weight,bias}": "column",
    "text.layers.{*}.attn.o.weight": "row",
    "text.layers.{*}.mlp_norm.weight": "sequence",
    "text.layers.{*}.mlp.{gate,up}.weight": "column",
    "text.layers.{*}.mlp.down.weight": "row",
    "text.norm.weight": "sequence",
}

_VISION: dict[str, TensorStyle] = {
    "vision.patch_embed.weight": "replicate",
    "vision.blocks.{*}.{attn_norm,mlp_norm}.{weight,bias}": "replicate",
    "vision.blocks.{*}.attn.qkv.{weight,bias}": "column",
    "vision.blocks.{*}.attn.proj.weight": "row",
    "vision.blocks.{*}.attn.proj.bias": "replicate",
    "vision.blocks.{*}.mlp.up.{weight,bias}": "column",
    "vision.blocks.{*}.mlp.down.weight": "row",
    "vision.blocks.{*}.mlp.down.bias": "replicate",
    "projector.norm.{weight,bias}": "replicate",
    "projector.up.{weight,bias}": "column",
    "projector.down.weight": "row",
    "projector.down.bias": "replicate",
}


def plan(config: Qwen2VLConfig) -> ModelPlan:
    head: dict[str, TensorStyle] = {} if config.tie_word_embeddings else {"head.weight": "vocab"}
    text, vision = config.text, config.vision
    return ModelPlan(
        blocks=("vision.blocks.{*}", "text.layers.{*}"),
        tensor={**_VISION, **_TEXT, **head},
        stages=_stages(config),
        idle_groups=("vision", "projector"),
        with_root=("text.embed", "head"),  # the loss multiplies by the head, and a tied head reads the embedding
        attention=("vision.blocks.{*}.attn.core", "text.layers.{*}.attn.core"),
        heads={
            "vision.blocks.{*}.attn.qkv": vision.num_heads,
            "text.layers.{*}.attn.q": text.num_attention_heads,
            "text.layers.{*}.attn.{k,v}": text.num_key_value_heads,
        },
        towers={"vision": "vision"},
        tied={"head": "text.embed"} if config.tie_word_embeddings else {},
    )


def _stages(config: Qwen2VLConfig) -> tuple[Stage, ...]:
    """Costs are weights per token, in those of one text layer. A picture has merge^2 patches for each of its tokens."""
    text, vision = config.text, config.vision
    attention = 2 * text.hidden_size * text.head_size * (text.num_attention_heads + text.num_key_value_heads)
    layer = attention + 3 * text.hidden_size * text.intermediate_size
    patches = vision.spatial_merge_size**2
    block = (4 + 2 * vision.mlp_ratio) * vision.embed_dim**2
    joined = vision.embed_dim * patches
    return (
        Stage("vision.patch_embed", patches * vision.patch_values * vision.embed_dim / layer),
        Stage("vision.blocks.{*}", patches * block / layer, "vision", Carry(patches, vision.embed_dim)),
        Stage("projector", joined * (joined + text.hidden_size) / layer),
        Stage("text.embed", 0.0, carry=Carry(1, text.hidden_size)),
        Stage("text.layers.{*}", 1.0, "text", Carry(1, text.hidden_size)),
        Stage("text.norm", 0.0),
        Stage("head", text.hidden_size * text.vocab_size / layer),
    )
