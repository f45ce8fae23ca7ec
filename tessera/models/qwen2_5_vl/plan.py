"""How Qwen2.5-VL may be dealt out over devices."""

from __future__ import annotations

from tessera.core.types import Carry, ModelPlan, Stage, TensorStyle
from tessera.models._text.plan import layer_weights, text_stages
from tessera.models._vision.plan import seeing_plan
from tessera.models.qwen2_5_vl.config import Qwen25VLConfig, VisionConfig

_VISION: dict[str, TensorStyle] = {
    "vision.patch_embed.weight": "replicate",
    "vision.blocks.{*}.{attn_norm,mlp_norm}.weight": "replicate",
    "vision.blocks.{*}.attn.qkv.{weight,bias}": "column",
    "vision.blocks.{*}.attn.proj.weight": "row",
    "vision.blocks.{*}.attn.proj.bias": "replicate",
    "vision.blocks.{*}.mlp.{gate,up}.{weight,bias}": "column",
    "vision.blocks.{*}.mlp.down.weight": "row",
    "vision.blocks.{*}.mlp.down.bias": "replicate",
    "projector.norm.weight": "replicate",
    "projector.up.{weight,bias}": "column",
    "projector.down.weight": "row",
    "projector.down.bias": "replicate",
}


def plan(config: Qwen25VLConfig) -> ModelPlan:
    return seeing_plan(
        config.text,
        _VISION,
        _stages(config),
        tied=config.tie_word_embeddings,
        vision_heads=config.vision.num_heads,
    )


def block_weights(vision: VisionConfig) -> int:
    """Weights that a patch meets in one block."""
    return vision.hidden_size * (4 * vision.hidden_size + 3 * vision.intermediate_size)


def projector_weights(config: Qwen25VLConfig) -> int:
    """Weights that the features of one token meet."""
    joined = config.vision.hidden_size * config.vision.spatial_merge_size**2
    return joined * (joined + config.text.hidden_size)


def _stages(config: Qwen25VLConfig) -> tuple[Stage, ...]:
    """Costs are weights per token, in those of one text layer. A picture has merge^2 patches for each of its tokens."""
    text, vision = config.text, config.vision
    layer = layer_weights(text)
    patches = vision.spatial_merge_size**2
    embed = patches * vision.patch_values * vision.hidden_size
    carry = Carry(patches, vision.hidden_size)
    return (
        Stage("vision.patch_embed", embed / layer),
        Stage("vision.blocks.{*}", patches * block_weights(vision) / layer, "vision", carry),
        Stage("projector", projector_weights(config) / layer),
        *text_stages(text),
    )
