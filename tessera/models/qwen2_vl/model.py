"""Qwen2-VL from the common blocks."""

from __future__ import annotations

from tessera.models._text.build import build_head, build_text
from tessera.models.qwen2_vl.config import Qwen2VLConfig
from tessera.nn.projector import PatchMerger
from tessera.nn.vit import VisionShape, VisionTower
from tessera.nn.vlm import VisionLanguageModel


def build(config: Qwen2VLConfig) -> VisionLanguageModel:
    vision, text = VisionTower(vision_shape(config)), build_text(config.text, config.attention)
    projector = PatchMerger(vision.shape.hidden, vision.shape.merge, text.shape.hidden)
    head = build_head(text, config.tie_word_embeddings)
    return VisionLanguageModel(vision, projector, text, head, config.text.initializer_range)


def vision_shape(config: Qwen2VLConfig) -> VisionShape:
    vision = config.vision
    return VisionShape(
        patch_values=vision.patch_values,
        hidden=vision.embed_dim,
        intermediate=vision.embed_dim * vision.mlp_ratio,
        layers=vision.depth,
        heads=vision.num_heads,
        merge=vision.spatial_merge_size,
        activation=vision.hidden_act,
        rope_theta=vision.rope_theta,
        attention=config.attention,
    )
