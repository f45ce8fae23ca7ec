"""How Qwen3-VL may be dealt out over devices."""

from __future__ import annotations

from tessera.core.types import Carry, ModelPlan, Stage, TensorStyle
from tessera.models._text.plan import (
    ATTENTION,
    BLOCKS,
    layer_weights,
    text_experts,
    text_heads,
    text_stages,
    text_styles,
)
from tessera.models.qwen3_vl.config import Qwen3VLConfig

_VISION: dict[str, TensorStyle] = {
    "vision.patch_embed.{weight,bias}": "replicate",
    "vision.table.weight": "replicate",
    "vision.blocks.{*}.{attn_norm,mlp_norm}.{weight,bias}": "replicate",
    "vision.blocks.{*}.attn.qkv.{weight,bias}": "column",
    "vision.blocks.{*}.attn.proj.weight": "row",
    "vision.blocks.{*}.attn.proj.bias": "replicate",
    "vision.blocks.{*}.mlp.up.{weight,bias}": "column",
    "vision.blocks.{*}.mlp.down.weight": "row",
    "vision.blocks.{*}.mlp.down.bias": "replicate",
}


def plan(config: Qwen3VLConfig) -> ModelPlan:
    text, vision, tied = config.text, config.vision, config.tie_word_embeddings
    return ModelPlan(
        blocks=("vision.blocks.{*}", BLOCKS),
        tensor={**_VISION, **_mergers(len(vision.deepstack_visual_indexes)), **text_styles(text, tied)},
        stages=_stages(config),
        idle_groups=("vision", "projector"),
        experts=text_experts(text),
        with_root=("text.embed", "head"),  # the loss multiplies by the head, and a tied head reads the embedding
        attention=("vision.blocks.{*}.attn.core", ATTENTION),
        heads={"vision.blocks.{*}.attn.qkv": vision.num_heads, **text_heads(text)},
        towers={"vision": "vision"},
        tied={"head": "text.embed"} if tied else {},
    )


def _mergers(taps: int) -> dict[str, TensorStyle]:
    styles: dict[str, TensorStyle] = {}
    for merger in ("projector.last", *(["projector.taps.{*}"] if taps else [])):
        styles |= {
            f"{merger}.norm.{{weight,bias}}": "replicate",
            f"{merger}.up.{{weight,bias}}": "column",
            f"{merger}.down.weight": "row",
            f"{merger}.down.bias": "replicate",
        }
    return styles


def _stages(config: Qwen3VLConfig) -> tuple[Stage, ...]:
    """Costs are weights per token, in those of one text layer. A picture has merge^2 patches for each of its tokens."""
    text, vision = config.text, config.vision
    layer = layer_weights(text)
    patches, taps = vision.spatial_merge_size**2, len(vision.deepstack_visual_indexes)
    block = (4 * vision.hidden_size + 2 * vision.intermediate_size) * vision.hidden_size
    joined = vision.hidden_size * patches
    # The features of every tap travel with those of the last block.
    carry = Carry(patches, vision.hidden_size * (1 + taps))
    return (
        Stage("vision.patch_embed", patches * vision.patch_values * vision.hidden_size / layer),
        Stage("vision.table", 0.0),
        Stage("vision.blocks.{*}", patches * block / layer, "vision", carry),
        Stage("projector", (1 + taps) * joined * (joined + text.hidden_size) / layer),
        *text_stages(text, whole=taps),
    )
