"""How Qwen2-VL may be dealt out over devices."""

from __future__ import annotations

from tessera.core.types import Carry, ModelPlan, Stage, TensorStyle
from tessera.models._text.plan import layer_weights, text_stages
from tessera.models._vision.plan import seeing_plan
from tessera.models.qwen2_vl.config import Qwen2VLConfig

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
    return seeing_plan(
        config.text,
        _VISION,
        _stages(config),
        tied=config.tie_word_embeddings,
        vision_heads=config.vision.num_heads,
    )


def _stages(config: Qwen2VLConfig) -> tuple[Stage, ...]:
    """Costs are weights per token, in those of one text layer. A picture has merge^2 patches for each of its tokens."""
    text, vision = config.text, config.vision
    layer = layer_weights(text)
    patches = vision.spatial_merge_size**2
    block = (4 + 2 * vision.mlp_ratio) * vision.embed_dim**2
    joined = vision.embed_dim * patches
    return (
        Stage("vision.patch_embed", patches * vision.patch_values * vision.embed_dim / layer),
        Stage("vision.blocks.{*}", patches * block / layer, "vision", Carry(patches, vision.embed_dim)),
        Stage("projector", joined * (joined + text.hidden_size) / layer),
        *text_stages(text),
    )
