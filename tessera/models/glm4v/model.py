"""GLM-4.1V: its vision encoder and projector from the blocks in `nn`, and its parameter names in folders.

Folders have the parameter names of transformers' modules. A base model that was saved without its head is also read.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from torch import nn

from tessera.config.reader import Section
from tessera.models.glm4v.config import Glm4vConfig
from tessera.models.vision.family import GridFamily
from tessera.models.vision.patches import PositionTable
from tessera.nn.projector import DownsampleMerger
from tessera.nn.vit import VisionShape
from tessera.weights.map import Rule
from tessera.weights.operations import ConvToLinear, InterleavedToHalfRope, TensorChunk

_TEXT = "model.language_model."
_LAYER = _TEXT + "layers.{i}."


class Glm4v(GridFamily):
    name: ClassVar[str] = "glm4v"
    config: ClassVar[type[Section]] = Glm4vConfig
    processor: ClassVar[str] = "Glm4vProcessor"
    tower: ClassVar[str] = "model.visual."
    text_prefix: ClassVar[str] = _TEXT
    renames: ClassVar[tuple[tuple[str, str], ...]] = (("visual.", "model.visual."), ("language_model.", _TEXT))
    ignored: ClassVar[tuple[str, ...]] = ("rotary_pos_emb.inv_freq", "embeddings.position_ids")
    pairs: ClassVar[tuple[tuple[str, str], ...]] = (
        ("vision.patch_embed.bias", "patch_embed.proj.bias"),
        ("vision.norm_patches.weight", "post_conv_layernorm.weight"),
        ("vision.table.weight", "embeddings.position_embedding.weight"),
        ("vision.blocks.{i}.attn_norm.weight", "blocks.{i}.norm1.weight"),
        ("vision.blocks.{i}.attn.proj.weight", "blocks.{i}.attn.proj.weight"),
        ("vision.blocks.{i}.mlp_norm.weight", "blocks.{i}.norm2.weight"),
        ("vision.blocks.{i}.mlp.{part}.weight", "blocks.{i}.mlp.{part}_proj.weight"),
        ("vision.norm_after.weight", "post_layernorm.weight"),
        ("projector.downsample.bias", "downsample.bias"),
        ("projector.proj.weight", "merger.proj.weight"),
        ("projector.norm.{kind}", "merger.post_projection_norm.{kind}"),
        ("projector.{part}.weight", "merger.{part}_proj.weight"),
    )

    def rules(self, config: Glm4vConfig) -> list[Rule]:
        text = config.text
        to_half_rope = InterleavedToHalfRope(text.head_size, text.rotary_dim)
        gate_up, downsample = _LAYER + "mlp.gate_up_proj.weight", self.tower + "downsample.weight"
        return [
            Rule("projector.downsample.weight", downsample, ConvToLinear(config.vision.spatial_merge_size)),
            Rule("text.layers.{i}.attn.q.{kind}", _LAYER + "self_attn.q_proj.{kind}", to_half_rope),
            Rule("text.layers.{i}.attn.k.{kind}", _LAYER + "self_attn.k_proj.{kind}", to_half_rope),
            Rule("text.layers.{i}.attn_out_norm.weight", _LAYER + "post_self_attn_layernorm.weight"),
            Rule("text.layers.{i}.mlp_out_norm.weight", _LAYER + "post_mlp_layernorm.weight"),
            Rule("text.layers.{i}.mlp.gate.weight", gate_up, TensorChunk(0, 2)),
            Rule("text.layers.{i}.mlp.up.weight", gate_up, TensorChunk(1, 2)),
        ]

    def encoder(self, config: Glm4vConfig) -> dict[str, Any]:
        vision = config.vision
        return {
            "intermediate": config.text.hidden_size,
            "norm": "rms",
            "norm_eps": vision.rms_norm_eps,
            "gated": True,
            "patch_bias": True,
            "qkv_bias": vision.attention_bias,
            "proj_bias": False,
            "mlp_bias": False,
            "positions": vision.table_side**2,
            "norm_patches": True,
            "norm_after": True,
        }

    def projector(self, config: Glm4vConfig, shape: VisionShape) -> nn.Module:
        return DownsampleMerger(shape.hidden, shape.merge, config.text.hidden_size, config.vision.intermediate_size)

    @property
    def position_table(self) -> PositionTable:
        return bicubic_positions


CUBIC_A = -0.75  # parameter of the cubic kernel, as in `torch.nn.functional.grid_sample`


def bicubic_positions(positions: np.ndarray, height: int, width: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Return indices [P, 16] and fp32 weights [P, 16] that interpolate position embeddings bicubically.

    `positions` [P, 2] (row, column) are patches in a grid of `height` x `width`; the embedding table has `side` x
    `side` entries. Entries beyond an edge are replaced by those at the edge.
    """
    rows, row_weights = _neighbours(height, side)
    columns, column_weights = _neighbours(width, side)
    row, column = positions.T
    index = rows[row][:, :, None] * side + columns[column][:, None, :]
    weights = row_weights[row][:, :, None] * column_weights[column][:, None, :]
    return index.reshape(len(positions), 16), weights.reshape(len(positions), 16).astype(np.float32)


def _neighbours(patches: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the four nearest entries of the embedding table for each patch along one axis, and their weights."""
    at = (np.arange(patches) + 0.5) * side / patches - 0.5  # centres of the patches, in units of table entries
    first = np.floor(at)
    # distance from each of the four entries, at most 2
    distance = np.abs(at[:, None] - (first[:, None] + np.arange(-1, 3)))
    near = ((CUBIC_A + 2) * distance - (CUBIC_A + 3)) * distance**2 + 1
    far = CUBIC_A * (((distance - 5) * distance + 8) * distance - 4)
    entries = np.clip(first[:, None].astype(np.int64) + np.arange(-1, 3), 0, side - 1)
    return entries, np.where(distance <= 1, near, far)
