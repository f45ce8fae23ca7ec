"""GLM-4.1V from the common blocks."""

from __future__ import annotations

from tessera.models._text.build import build_head, build_text
from tessera.models.glm4v.config import Glm4vConfig
from tessera.nn.projector import DownsampleMerger
from tessera.nn.vit import VisionShape, VisionTower
from tessera.nn.vlm import VisionLanguageModel


def build(config: Glm4vConfig) -> VisionLanguageModel:
    vision, text = VisionTower(vision_shape(config)), build_text(config.text, config.attention)
    projector = DownsampleMerger(
        vision.shape.hidden, vision.shape.merge, text.shape.hidden, config.vision.intermediate_size
    )
    head = build_head(text, config.tie_word_embeddings)
    return VisionLanguageModel(vision, projector, text, head, config.text.initializer_range)


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
