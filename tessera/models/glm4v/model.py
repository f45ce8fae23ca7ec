"""GLM-4.1V: modules from the blocks in `nn`, parallel plan and costs."""

from __future__ import annotations

import numpy as np

from tessera.core.model_plan import ModelPlan, TensorStyle
from tessera.models.glm4v.config import Glm4vConfig
from tessera.models.text.costs import VisionCosts
from tessera.models.text.decoder import build_head, build_text
from tessera.models.vision.family import vision_language_model, vision_language_plan
from tessera.nn.multimodal import MultimodalModel
from tessera.nn.projector import DownsampleMerger
from tessera.nn.vit import VisionEncoder, VisionShape


def build(config: Glm4vConfig) -> MultimodalModel:
    vision, text = VisionEncoder(vision_shape(config)), build_text(config.text, config.attention)
    projector = DownsampleMerger(
        vision.shape.hidden, vision.shape.merge, text.shape.hidden, config.vision.intermediate_size
    )
    head = build_head(text, config.tie_word_embeddings)
    return vision_language_model(vision, projector, text, head, config.text.initializer_range)


def vision_shape(config: Glm4vConfig) -> VisionShape:
    vision = config.vision
    return VisionShape(
        patch_values=vision.patch_values,
        hidden=vision.hidden_size,
        intermediate=config.text.hidden_size,
        layers=vision.depth,
        heads=vision.num_heads,
        merge=vision.spatial_merge_size,
        activation=vision.hidden_act,
        norm="rms",
        norm_eps=vision.rms_norm_eps,
        gated=True,
        patch_bias=True,
        qkv_bias=vision.attention_bias,
        proj_bias=False,
        mlp_bias=False,
        rope_theta=vision.rope_theta,
        positions=vision.table_side**2,
        norm_patches=True,
        norm_after=True,
        attention=config.attention,
    )


_PROJECTOR: dict[str, TensorStyle] = {
    # The first two linear layers follow each other directly: column-parallel, then row-parallel.
    "projector.downsample.{weight,bias}": "column",
    "projector.proj.weight": "row",
    "projector.norm.{weight,bias}": "replicate",
    "projector.{gate,up}.weight": "column",
    "projector.down.weight": "row",
}


def plan(config: Glm4vConfig) -> ModelPlan:
    per_token = config.vision.spatial_merge_size**2
    return vision_language_plan(
        config.text, costs(config), _PROJECTOR, tied=config.tie_word_embeddings, per_token=per_token
    )


def costs(config: Glm4vConfig) -> VisionCosts:
    """Return the sizes from which the FLOPs of encoder and projector follow."""
    vision = config.vision
    hidden, merged = config.text.hidden_size, vision.spatial_merge_size**2
    projector = vision.hidden_size * merged * hidden + hidden**2 + 3 * hidden * vision.intermediate_size
    return VisionCosts(vision_shape(config), projector, merged)


CUBIC_A = -0.75  # constant of the cubic kernel of `torch.nn.functional.grid_sample`


def bicubic_positions(positions: np.ndarray, height: int, width: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the bicubic interpolation of a position embedding of `side` x `side` entries for patches of an image.

    `positions` [P, 2] (row, column) lie in a grid of `height` x `width`. The result is indices [P, 16] into the table
    and weights [P, 16] in fp32. Entries beyond an edge are those of the edge.
    """
    rows, row_weights = _neighbours(height, side)
    columns, column_weights = _neighbours(width, side)
    row, column = positions.T
    index = rows[row][:, :, None] * side + columns[column][:, None, :]
    weights = row_weights[row][:, :, None] * column_weights[column][:, None, :]
    return index.reshape(len(positions), 16), weights.reshape(len(positions), 16).astype(np.float32)


def _neighbours(patches: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Return four neighbouring entries of each patch along one axis, and their weights."""
    at = (np.arange(patches) + 0.5) * side / patches - 0.5  # centres of patches, in entries
    first = np.floor(at)
    distance = np.abs(at[:, None] - (first[:, None] + np.arange(-1, 3)))  # to each of the four, at most 2
    near = ((CUBIC_A + 2) * distance - (CUBIC_A + 3)) * distance**2 + 1
    far = CUBIC_A * (((distance - 5) * distance + 8) * distance - 4)
    entries = np.clip(first[:, None].astype(np.int64) + np.arange(-1, 3), 0, side - 1)
    return entries, np.where(distance <= 1, near, far)
