"""How Qwen3-VL may be dealt out over devices."""

from __future__ import annotations

from tessera.core.types import Carry, ModelPlan, Stage, TensorStyle
from tessera.models._text.plan import layer_weights, text_stages
from tessera.models._vision.plan import seeing_plan
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
    return seeing_plan(
        config.text,
        {**_VISION, **_mergers(len(config.vision.deepstack_visual_indexes))},
        _stages(config),
        tied=config.tie_word_embeddings,
        vision_heads=config.vision.num_heads,
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
