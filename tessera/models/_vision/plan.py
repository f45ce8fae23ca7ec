"""How a tower that sees and a text tower may be dealt out together."""

from __future__ import annotations

from collections.abc import Mapping

from tessera.core.types import ModelPlan, Stage, TensorStyle
from tessera.models._text.config import TextConfig
from tessera.models._text.plan import ATTENTION, BLOCKS, text_experts, text_heads, text_styles

VISION_BLOCKS = "vision.blocks.{*}"


def seeing_plan(
    text: TextConfig,
    styles: Mapping[str, TensorStyle],
    stages: tuple[Stage, ...],
    *,
    tied: bool,
    vision_heads: int,
    vision_blocks: str = VISION_BLOCKS,  # those that are computed
) -> ModelPlan:
    """`styles`: of the vision tower and its projector; they also overrule those of the text tower."""
    return ModelPlan(
        blocks=(vision_blocks, BLOCKS),
        tensor={**text_styles(text, tied), **styles},
        stages=stages,
        idle_groups=("vision", "projector"),
        experts=text_experts(text),
        with_root=("text.embed", "head"),  # the loss multiplies by the head, and a tied head reads the embedding
        attention=(f"{vision_blocks}.attn.core", ATTENTION),
        heads={f"{VISION_BLOCKS}.attn.qkv": vision_heads, **text_heads(text)},
        towers={"vision": "vision"},
        tied={"head": "text.embed"} if tied else {},
    )
