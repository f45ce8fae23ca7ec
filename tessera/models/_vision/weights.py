"""Names of towers over grids of patches, in Hugging Face folders."""

from __future__ import annotations

from collections.abc import Iterable

from tessera.core.weightmap import GroupByHead, Reshape, Rule
from tessera.models._vision.config import GridVisionConfig


def grid_tower_rules(
    vision: GridVisionConfig, width: int, heads: int, prefix: str, pairs: Iterable[tuple[str, str]]
) -> list[Rule]:
    """`pairs`: our names and theirs behind `prefix`, of what is the same there. Patches are embedded by a convolution,
    and what makes queries, keys and values groups them by kind."""
    patch = (vision.in_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    as_convolution = Reshape((width, vision.patch_values), (width, *patch))
    return [
        Rule("vision.patch_embed.weight", prefix + "patch_embed.proj.weight", as_convolution),
        Rule("vision.blocks.{i}.attn.qkv.{kind}", prefix + "blocks.{i}.attn.qkv.{kind}", GroupByHead(heads)),
        *(Rule(ours, prefix + theirs) for ours, theirs in pairs),
    ]
