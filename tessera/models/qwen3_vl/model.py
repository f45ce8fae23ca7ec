"""Qwen3-VL: DeepStack features of the vision encoder, and its parameter names in folders.

Folders have the parameter names of transformers' modules. A base model that was saved without its head is also read.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from torch import nn

from tessera.config.reader import Section
from tessera.models.qwen3_vl.config import Qwen3VLConfig
from tessera.models.vision.family import GridFamily
from tessera.models.vision.patches import PositionTable
from tessera.nn.projector import DeepStackMerger
from tessera.nn.vit import VisionShape

_TEXT = "model.language_model."
BLOCKS = (
    ("vision.patch_embed.bias", "patch_embed.proj.bias"),
    ("vision.table.weight", "pos_embed.weight"),
    ("vision.blocks.{i}.attn_norm.{kind}", "blocks.{i}.norm1.{kind}"),
    ("vision.blocks.{i}.attn.proj.{kind}", "blocks.{i}.attn.proj.{kind}"),
    ("vision.blocks.{i}.mlp_norm.{kind}", "blocks.{i}.norm2.{kind}"),
    ("vision.blocks.{i}.mlp.up.{kind}", "blocks.{i}.mlp.linear_fc1.{kind}"),
    ("vision.blocks.{i}.mlp.down.{kind}", "blocks.{i}.mlp.linear_fc2.{kind}"),
)


class Qwen3VL(GridFamily):
    name: ClassVar[str] = "qwen3_vl"
    config: ClassVar[type[Section]] = Qwen3VLConfig
    processor: ClassVar[str] = "Qwen3VLProcessor"
    hf_types: ClassVar[tuple[str, ...]] = tuple(Qwen3VLConfig.formats)
    tower: ClassVar[str] = "model.visual."
    text_prefix: ClassVar[str] = _TEXT
    renames: ClassVar[tuple[tuple[str, str], ...]] = (("visual.", "model.visual."), ("language_model.", _TEXT))
    stacked: ClassVar[bool] = True
    pairs: ClassVar[tuple[tuple[str, str], ...]] = (
        *BLOCKS,
        ("projector.last.norm.{kind}", "merger.norm.{kind}"),
        ("projector.last.up.{kind}", "merger.linear_fc1.{kind}"),
        ("projector.last.down.{kind}", "merger.linear_fc2.{kind}"),
        ("projector.taps.{i}.norm.{kind}", "deepstack_merger_list.{i}.norm.{kind}"),
        ("projector.taps.{i}.up.{kind}", "deepstack_merger_list.{i}.linear_fc1.{kind}"),
        ("projector.taps.{i}.down.{kind}", "deepstack_merger_list.{i}.linear_fc2.{kind}"),
    )

    def encoder(self, config: Qwen3VLConfig) -> dict[str, Any]:
        vision = config.vision
        return {
            "intermediate": vision.intermediate_size,
            "patch_bias": True,
            "positions": vision.num_position_embeddings,
            "deepstack_blocks": vision.deepstack_visual_indexes,
        }

    def projector(self, config: Qwen3VLConfig, shape: VisionShape) -> nn.Module:
        return DeepStackMerger(shape.hidden, shape.merge, config.text.hidden_size, len(shape.deepstack_blocks))

    @property
    def position_table(self) -> PositionTable:
        return bilinear_positions


def bilinear_positions(positions: np.ndarray, height: int, width: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Return indices [P, 4] and weights [P, 4] that interpolate position embeddings bilinearly.

    `positions` [P, 2] are patches in a grid of `height` x `width`, which is stretched over the `side` x `side` entries
    of the embedding table.
    """
    rows, row_weights = _neighbours(positions[:, 0], height, side)
    columns, column_weights = _neighbours(positions[:, 1], width, side)
    index = (rows[:, :, None] * side + columns[:, None, :]).reshape(-1, 4)
    return index, (row_weights[:, :, None] * column_weights[:, None, :]).reshape(-1, 4)


def _neighbours(positions: np.ndarray, size: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the two neighbouring entries of each position along one axis and their weights, in fp32 as
    transformers."""
    at = positions.astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
    first = np.floor(at)
    near = at - first
    neighbours = np.stack([first, first + 1], axis=1).astype(np.int64).clip(0, side - 1)
    return neighbours, np.stack([1 - near, 1 - (1 - near)], axis=1)  # the nearer entry has the larger weight
