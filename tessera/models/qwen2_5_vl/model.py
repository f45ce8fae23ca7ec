"""Qwen2.5-VL: modules from the blocks in `nn`, parallel plan and costs."""

from __future__ import annotations

import numpy as np

from tessera.core.model_plan import ModelPlan
from tessera.models.qwen2_5_vl.config import Qwen25VLConfig
from tessera.models.text.costs import VisionCosts
from tessera.models.text.decoder import build_head, build_text
from tessera.models.vision.family import merger_styles, vision_language_model, vision_language_plan
from tessera.nn.layers import RMSNorm
from tessera.nn.multimodal import MultimodalModel
from tessera.nn.projector import PatchMerger
from tessera.nn.vit import VisionEncoder, VisionShape


def build(config: Qwen25VLConfig) -> MultimodalModel:
    vision, text = VisionEncoder(vision_shape(config)), build_text(config.text, config.attention)
    projector = PatchMerger(vision.shape.hidden, vision.shape.merge, text.shape.hidden, norm=RMSNorm)
    head = build_head(text, config.tie_word_embeddings)
    return vision_language_model(vision, projector, text, head, config.text.initializer_range)


def vision_shape(config: Qwen25VLConfig) -> VisionShape:
    vision = config.vision
    return VisionShape(
        patch_values=vision.patch_values,
        hidden=vision.hidden_size,
        intermediate=vision.intermediate_size,
        layers=vision.depth,
        heads=vision.num_heads,
        merge=vision.spatial_merge_size,
        activation=vision.hidden_act,
        norm="rms",
        gated=True,
        rope_theta=vision.rope_theta,
        windows=True,
        full_attn_blocks=vision.full,
        attention=config.attention,
    )


def plan(config: Qwen25VLConfig) -> ModelPlan:
    per_token = config.vision.spatial_merge_size**2
    return vision_language_plan(
        config.text, costs(config), merger_styles(norm="weight"), tied=config.tie_word_embeddings, per_token=per_token
    )


def costs(config: Qwen25VLConfig) -> VisionCosts:
    """Return the sizes from which the FLOPs of encoder and projector follow."""
    vision = config.vision
    joined = vision.hidden_size * vision.spatial_merge_size**2
    return VisionCosts(vision_shape(config), joined * (joined + config.text.hidden_size), vision.spatial_merge_size**2)


def window_order(rows: int, columns: int, side: int) -> np.ndarray:
    """Return the indices of a frame's tokens, window by window and row by row inside each window."""
    window = (np.arange(rows) // side)[:, None] * -(-columns // side) + np.arange(columns) // side
    return np.argsort(window.reshape(-1), kind="stable")


def window_sizes(rows: int, columns: int, side: int) -> list[int]:
    """Return the number of tokens of each window in that order; windows at the right and bottom may be smaller."""
    return [high * wide for high in _cuts(rows, side) for wide in _cuts(columns, side)]


def _cuts(length: int, side: int) -> list[int]:
    return [min(side, length - start) for start in range(0, length, side)]
