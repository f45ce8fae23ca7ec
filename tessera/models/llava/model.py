"""LLaVA: modules from the blocks in `nn`, parallel plan and costs."""

from __future__ import annotations

from tessera.core.model_plan import ModelPlan, TensorStyle
from tessera.models.llava.config import LlavaConfig
from tessera.models.text.costs import VisionCosts
from tessera.models.text.decoder import build_head, build_text
from tessera.models.vision.family import vision_language_model, vision_language_plan
from tessera.nn.multimodal import MultimodalModel
from tessera.nn.projector import MLPProjector
from tessera.nn.vit import VisionEncoder, VisionShape


def build(config: LlavaConfig) -> MultimodalModel:
    vision, text = VisionEncoder(vision_shape(config)), build_text(config.text, config.attention)
    projector = MLPProjector(
        vision.shape.hidden,
        text.shape.hidden,
        activation=config.projector_hidden_act,
        bias=config.multimodal_projector_bias,
        newline=config.tiles is not None,
    )
    head = build_head(text, config.tie_word_embeddings)
    return vision_language_model(vision, projector, text, head, config.text.initializer_range)


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
        num_blocks_used=config.blocks_read,
        attention=config.attention,
    )


_PATCHES_OF_TILES = 2  # per visual token: an image is encoded whole and in tiles, and video features are pooled


def plan(config: LlavaConfig) -> ModelPlan:
    """Return the plan. The vision encoder is not split over stages: the number of patches per token differs between
    images (video features are pooled, padding is dropped), and the encoder is small beside a text decoder that needs
    several stages."""
    styles: dict[str, TensorStyle] = {"projector.up.weight": "column", "projector.down.weight": "row"}
    if config.multimodal_projector_bias:
        styles |= {"projector.up.bias": "column", "projector.down.bias": "replicate"}
    if config.tiles is not None:
        styles["projector.newline"] = "replicate"
    return vision_language_plan(
        config.text,
        costs(config),
        styles,
        tied=config.tie_word_embeddings,
        per_token=None,
        patches=1 if config.tiles is None else _PATCHES_OF_TILES,
    )


def costs(config: LlavaConfig) -> VisionCosts:
    """Return the sizes from which the FLOPs of encoder and projector follow."""
    vision = config.vision
    hidden = config.text.hidden_size
    projector = hidden * (vision.hidden_size + hidden)
    return VisionCosts(vision_shape(config), projector, vision.patches, config.features)
