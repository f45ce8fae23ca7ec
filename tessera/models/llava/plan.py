"""How LLaVA may be dealt out over devices.

Blocks of the vision tower behind the features that are read lie in every folder and are computed by nobody. They are no
blocks of the plan: they are frozen from the start (see `VisionShape.read`), stay whole beside the embeddings where the
others are gathered one by one, and cost nothing.
"""

from __future__ import annotations

from tessera.core.types import ModelPlan, Stage, TensorStyle
from tessera.models._text.plan import layer_weights, text_stages
from tessera.models._vision.plan import seeing_plan
from tessera.models.llava.config import LlavaConfig

_PATCHES_OF_TILES = 2  # for each visual token: a picture is seen twice, whole and in tiles, frames are pooled


def plan(config: LlavaConfig) -> ModelPlan:
    return seeing_plan(
        config.text,
        _styles(config),
        _stages(config),
        tied=config.tie_word_embeddings,
        vision_heads=config.vision.num_attention_heads,
        vision_blocks=_read(config),
    )


def _read(config: LlavaConfig) -> str:
    return f"vision.blocks.{{0-{config.blocks_read - 1}}}"


def _styles(config: LlavaConfig) -> dict[str, TensorStyle]:
    styles: dict[str, TensorStyle] = {
        "vision.patch_embed.weight": "replicate",
        "vision.table.weight": "replicate",
        "vision.norm_after.{weight,bias}": "replicate",
        "vision.blocks.{*}.{attn_norm,mlp_norm}.{weight,bias}": "replicate",
        "vision.blocks.{*}.attn.qkv.{weight,bias}": "column",
        "vision.blocks.{*}.attn.proj.weight": "row",
        "vision.blocks.{*}.attn.proj.bias": "replicate",
        "vision.blocks.{*}.mlp.up.{weight,bias}": "column",
        "vision.blocks.{*}.mlp.down.weight": "row",
        "vision.blocks.{*}.mlp.down.bias": "replicate",
        "projector.up.weight": "column",
        "projector.down.weight": "row",
    }
    if config.vision.kind == "clip":
        styles |= {"vision.table.class_token": "replicate", "vision.norm_before.{weight,bias}": "replicate"}
    else:
        styles["vision.patch_embed.bias"] = "replicate"
    if config.multimodal_projector_bias:
        styles |= {"projector.up.bias": "column", "projector.down.bias": "replicate"}
    return styles if config.tiles is None else {**styles, "projector.newline": "replicate"}


def _stages(config: LlavaConfig) -> tuple[Stage, ...]:
    """Costs are weights per token, in those of one text layer.

    A pipeline is not cut within the tower: how many patches stand behind a token differs from picture to picture (a
    clip is pooled, padding is left out), and the tower is small beside any text tower that needs several stages.
    """
    text, vision = config.text, config.vision
    layer = layer_weights(text)
    block = (4 * vision.hidden_size + 2 * vision.intermediate_size) * vision.hidden_size
    unread = range(config.blocks_read, vision.num_hidden_layers)
    patches = 1 if config.tiles is None else _PATCHES_OF_TILES
    return (
        Stage("vision.patch_embed", patches * vision.patch_values * vision.hidden_size / layer),
        Stage("vision.table", 0.0),
        *([Stage("vision.norm_before", 0.0)] if vision.kind == "clip" else []),
        Stage(_read(config), patches * block / layer, "vision"),
        *(Stage(f"vision.blocks.{number}", 0.0) for number in unread),
        Stage("vision.norm_after", 0.0),
        Stage("projector", patches * (vision.hidden_size + text.hidden_size) * text.hidden_size / layer),
        *text_stages(text),
    )
