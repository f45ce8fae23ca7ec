"""Qwen2.5-VL: Qwen2-VL with window attention in most blocks of the vision encoder."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from torch import nn

from tessera.config.reader import Section
from tessera.models.qwen2_5_vl.config import Qwen25VLConfig
from tessera.models.qwen2_vl.model import MERGER, RENAMES
from tessera.models.vision.family import GridFamily
from tessera.nn.layers import RMSNorm
from tessera.nn.projector import PatchMerger
from tessera.nn.vit import VisionShape


class Qwen25VL(GridFamily):
    name: ClassVar[str] = "qwen2_5_vl"
    config: ClassVar[type[Section]] = Qwen25VLConfig
    processor: ClassVar[str] = "Qwen25VLProcessor"
    tower: ClassVar[str] = "visual."
    renames: ClassVar[tuple[tuple[str, str], ...]] = RENAMES
    pairs: ClassVar[tuple[tuple[str, str], ...]] = (
        ("vision.blocks.{i}.attn_norm.weight", "blocks.{i}.norm1.weight"),
        ("vision.blocks.{i}.attn.proj.{kind}", "blocks.{i}.attn.proj.{kind}"),
        ("vision.blocks.{i}.mlp_norm.weight", "blocks.{i}.norm2.weight"),
        ("vision.blocks.{i}.mlp.{part}.{kind}", "blocks.{i}.mlp.{part}_proj.{kind}"),
        *MERGER,
    )

    def encoder(self, config: Qwen25VLConfig) -> dict[str, Any]:
        vision = config.vision
        return {
            "intermediate": vision.intermediate_size,
            "norm": "rms",
            "gated": True,
            "windows": True,
            "full_attn_blocks": vision.full,
        }

    def projector(self, config: Qwen25VLConfig, shape: VisionShape) -> nn.Module:
        return PatchMerger(shape.hidden, shape.merge, config.text.hidden_size, norm=RMSNorm)

    def window_sizes(self, config: Qwen25VLConfig, side: int) -> list[int]:
        return window_sizes(side, side, config.vision.window)


def window_order(rows: int, columns: int, side: int) -> np.ndarray:
    """Return the indices of a frame's tokens, ordered by window and by row within a window."""
    window = (np.arange(rows) // side)[:, None] * -(-columns // side) + np.arange(columns) // side
    return np.argsort(window.reshape(-1), kind="stable")


def window_sizes(rows: int, columns: int, side: int) -> list[int]:
    """Return the number of tokens of each window, in the order of `window_order`. Windows at the edges may be
    smaller."""
    return [high * wide for high in _cuts(rows, side) for wide in _cuts(columns, side)]


def _cuts(length: int, side: int) -> list[int]:
    return [min(side, length - start) for start in range(0, length, side)]
