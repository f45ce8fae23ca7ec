"""Qwen3-VL from the common blocks."""

from __future__ import annotations

from tessera.models._text.build import build_head, build_text
from tessera.models.qwen3_vl.config import Qwen3VLConfig
from tessera.nn.projector import DeepStackMerger
from tessera.nn.vit import VisionShape, VisionTower
from tessera.nn.vlm import VisionLanguageModel


def build(config: Qwen3VLConfig) -> VisionLanguageModel:
    vision, text = VisionTower(vision_shape(config)), build_text(config.text, config.attention)
    shape = vision.shape
    projector = DeepStackMerger(shape.hidden, shape.merge, text.shape.hidden, len(shape.taps))
    head = build_head(text, config.tie_word_embeddings)
    return VisionLanguageModel(vision, projector, text, head, config.text.initializer_range)


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
        taps=vision.deepstack_visual_indexes,
        attention=config.attention,
    )
