"""How GLM-4.1V may be dealt out over devices."""

from __future__ import annotations

from tessera.core.types import Carry, ModelPlan, Stage, TensorStyle
from tessera.models._text.plan import layer_weights, text_stages
from tessera.models._vision.plan import seeing_plan
from tessera.models.glm4v.config import Glm4vConfig

_VISION: dict[str, TensorStyle] = {
    "vision.patch_embed.{weight,bias}": "replicate",
    "vision.{norm_patches,table,norm_after}.weight": "replicate",
    "vision.blocks.{*}.{attn_norm,mlp_norm}.weight": "replicate",
    "vision.blocks.{*}.attn.qkv.{weight,bias}": "column",
    "vision.blocks.{*}.attn.proj.weight": "row",
    "vision.blocks.{*}.mlp.{gate,up}.weight": "column",
    "vision.blocks.{*}.mlp.down.weight": "row",
    # Nothing but a product lies between these two: what the first cuts by columns the second takes by rows.
    "projector.downsample.{weight,bias}": "column",
    "projector.proj.weight": "row",
    "projector.norm.{weight,bias}": "replicate",
    "projector.{gate,up}.weight": "column",
    "projector.down.weight": "row",
}


def plan(config: Glm4vConfig) -> ModelPlan:
    return seeing_plan(
        config.text,
        _VISION,
        _stages(config),
        tied=config.tie_word_embeddings,
        vision_heads=config.vision.num_heads,
    )


def block_weights(config: Glm4vConfig) -> int:
    width = config.vision.hidden_size
    return 4 * width**2 + 3 * width * config.text.hidden_size


def projector_weights(config: Glm4vConfig) -> int:
    vision, hidden = config.vision, config.text.hidden_size
    joined = vision.hidden_size * vision.spatial_merge_size**2
    return joined * hidden + hidden**2 + 3 * hidden * vision.intermediate_size


def _stages(config: Glm4vConfig) -> tuple[Stage, ...]:
    """Costs are weights per token, in those of one text layer. A picture has merge^2 patches for each of its tokens."""
    vision, layer = config.vision, layer_weights(config.text)
    patches = vision.spatial_merge_size**2
    return (
        Stage("vision.patch_embed", patches * vision.patch_values * vision.hidden_size / layer),
        Stage("vision.norm_patches", 0.0),
        Stage("vision.table", 0.0),
        Stage(
            "vision.blocks.{*}", patches * block_weights(config) / layer, "vision", Carry(patches, vision.hidden_size)
        ),
        Stage("vision.norm_after", 0.0),
        Stage("projector", projector_weights(config) / layer),
        *text_stages(config.text),
    )
