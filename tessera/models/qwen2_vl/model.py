"""Qwen2-VL: modules from the blocks in `nn`, parallel plan and costs."""

from __future__ import annotations

from tessera.core.model_plan import ModelPlan
from tessera.models.qwen2_vl.config import Qwen2VLConfig
from tessera.models.text.costs import VisionCosts
from tessera.models.text.decoder import build_head, build_text
from tessera.models.vision.family import merger_styles, vision_language_model, vision_language_plan
from tessera.nn.multimodal import MultimodalModel
from tessera.nn.projector import PatchMerger
from tessera.nn.vit import VisionEncoder, VisionShape


def build(config: Qwen2VLConfig) -> MultimodalModel:
    vision, text = VisionEncoder(vision_shape(config)), build_text(config.text, config.attention)
    projector = PatchMerger(vision.shape.hidden, vision.shape.merge, text.shape.hidden)
    head = build_head(text, config.tie_word_embeddings)
    return vision_language_model(vision, projector, text, head, config.text.initializer_range)


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


def plan(config: Qwen2VLConfig) -> ModelPlan:
    per_token = config.vision.spatial_merge_size**2
    return vision_language_plan(
        config.text, costs(config), merger_styles(), tied=config.tie_word_embeddings, per_token=per_token
    )


def costs(config: Qwen2VLConfig) -> VisionCosts:
    """Return the sizes from which the FLOPs of encoder and projector follow."""
    vision = config.vision
    joined = vision.embed_dim * vision.spatial_merge_size**2
    return VisionCosts(vision_shape(config), joined * (joined + config.text.hidden_size), vision.spatial_merge_size**2)
