"""LLaVA from the common blocks."""

from __future__ import annotations

from tessera.models._text.build import build_head, build_text
from tessera.models.llava.config import LlavaConfig
from tessera.nn.projector import MLPProjector
from tessera.nn.vit import VisionShape, VisionTower
from tessera.nn.vlm import VisionLanguageModel


def build(config: LlavaConfig) -> VisionLanguageModel:
    vision, text = VisionTower(vision_shape(config)), build_text(config.text, config.attention)
    projector = MLPProjector(
        vision.shape.hidden,
        text.shape.hidden,
        activation=config.projector_hidden_act,
        bias=config.multimodal_projector_bias,
        newline=config.tiles is not None,
    )
    head = build_head(text, config.tie_word_embeddings)
    return VisionLanguageModel(vision, projector, text, head, config.text.initializer_range)


def vision_shape(config: LlavaConfig) -> VisionShape:
    vision = config.vision
    return VisionShape(
        patch_values=vision.patch_values,
        hidden=vision.hidden_size,
        intermediate=vision.intermediate_size,
        layers=vision.num_hidden_layers,
        heads=vision.num_attention_heads,
        merge=1,
        activation=vision.hidden_act,
        norm_eps=vision.layer_norm_eps,
        patch_bias=vision.kind == "siglip",
        rope_theta=None,
        positions=vision.patches,
        class_token=vision.class_token,
        norm_before=vision.kind == "clip",
        norm_after=True,  # never read, and yet in every folder
        read=config.blocks_read,
        attention=config.attention,
    )
