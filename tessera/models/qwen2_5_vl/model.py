"""Qwen2.5-VL from the common blocks."""

from __future__ import annotations

from tessera.models._text.build import build_head, build_text
from tessera.models.qwen2_5_vl.config import Qwen25VLConfig
from tessera.nn.norm import RMSNorm
from tessera.nn.projector import PatchMerger
from tessera.nn.vit import VisionShape, VisionTower
from tessera.nn.vlm import VisionLanguageModel


def build(config: Qwen25VLConfig) -> VisionLanguageModel:
    vision, text = VisionTower(vision_shape(config)), build_text(config.text, config.attention)
    projector = PatchMerger(vision.shape.hidden, vision.shape.merge, text.shape.hidden, norm=RMSNorm)
    head = build_head(text, config.tie_word_embeddings)
    return VisionLanguageModel(vision, projector, text, head, config.text.initializer_range)


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
        full=vision.full,
        attention=config.attention,
    )
