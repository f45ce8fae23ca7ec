"""Qwen3-VL: modules from the blocks in `nn`, parallel plan and costs."""

from __future__ import annotations

import numpy as np

from tessera.core.model_plan import ModelPlan
from tessera.models.qwen3_vl.config import Qwen3VLConfig
from tessera.models.text.costs import VisionCosts
from tessera.models.text.decoder import build_head, build_text
from tessera.models.vision.family import merger_styles, vision_language_model, vision_language_plan
from tessera.nn.multimodal import MultimodalModel
from tessera.nn.projector import DeepStackMerger
from tessera.nn.vit import VisionEncoder, VisionShape


def build(config: Qwen3VLConfig) -> MultimodalModel:
    vision, text = VisionEncoder(vision_shape(config)), build_text(config.text, config.attention)
    shape = vision.shape
    projector = DeepStackMerger(shape.hidden, shape.merge, text.shape.hidden, len(shape.deepstack_blocks))
    head = build_head(text, config.tie_word_embeddings)
    return vision_language_model(vision, projector, text, head, config.text.initializer_range)


def vision_shape(config: Qwen3VLConfig) -> VisionShape:
    vision = config.vision
    return VisionShape(
        patch_values=vision.patch_values,
        hidden=vision.hidden_size,
        intermediate=vision.intermediate_size,
        layers=vision.depth,
        heads=vision.num_heads,
        merge=vision.spatial_merge_size,
        activation=vision.hidden_act,
        patch_bias=True,
        rope_theta=vision.rope_theta,
        positions=vision.num_position_embeddings,
        deepstack_blocks=vision.deepstack_visual_indexes,
        attention=config.attention,
    )


def plan(config: Qwen3VLConfig) -> ModelPlan:
    styles = merger_styles("projector.last")
    if config.vision.deepstack_visual_indexes:
        styles |= merger_styles("projector.taps.{*}")
    per_token = config.vision.spatial_merge_size**2
    return vision_language_plan(
        config.text, costs(config), styles, tied=config.tie_word_embeddings, per_token=per_token
    )


def costs(config: Qwen3VLConfig) -> VisionCosts:
    """Return the sizes from which the FLOPs of encoder and projector follow."""
    vision = config.vision
    merged = vision.spatial_merge_size**2
    joined = vision.hidden_size * merged
    mergers = 1 + len(vision.deepstack_visual_indexes)
    return VisionCosts(vision_shape(config), mergers * joined * (joined + config.text.hidden_size), merged)


def bilinear_positions(positions: np.ndarray, height: int, width: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the bilinear interpolation of a position embedding of `side` x `side` entries for patches of an image.

    `positions` [P, 2] lie in a grid of `height` x `width`, whose corners are the corners of the table. The result is
    indices [P, 4] into the table and weights [P, 4].
    """
    rows, row_weights = _neighbours(positions[:, 0], height, side)
    columns, column_weights = _neighbours(positions[:, 1], width, side)
    index = (rows[:, :, None] * side + columns[:, None, :]).reshape(-1, 4)
    return index, (row_weights[:, :, None] * column_weights[:, None, :]).reshape(-1, 4)


def _neighbours(positions: np.ndarray, size: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the two neighbours of each position along one axis and their weights, in fp32 as in the reference."""
    at = positions.astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
    first = np.floor(at)
    near = at - first
    neighbours = np.stack([first, first + 1], axis=1).astype(np.int64).clip(0, side - 1)
    return neighbours, np.stack([1 - near, 1 - (1 - near)], axis=1)  # each by its distance
