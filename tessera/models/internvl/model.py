"""InternVL: modules from the blocks in `nn`, parallel plan and costs."""

from __future__ import annotations

from tessera.core.model_plan import ModelPlan, TensorStyle
from tessera.models.internvl.config import InternVLConfig
from tessera.models.text.costs import VisionCosts
from tessera.models.text.decoder import build_head, build_text, text_styles
from tessera.models.vision.family import merger_styles, vision_language_model, vision_language_plan
from tessera.nn.multimodal import MultimodalModel
from tessera.nn.projector import PatchMerger
from tessera.nn.vit import VisionEncoder, VisionShape

PROJECTOR_EPS = 1e-5


def build(config: InternVLConfig) -> MultimodalModel:
    vision, text = VisionEncoder(vision_shape(config)), build_text(config.text, config.attention)
    projector = PatchMerger(
        vision.shape.hidden,
        vision.shape.merge,
        text.shape.hidden,
        PROJECTOR_EPS,
        inner=text.shape.hidden,
        norm_joined=True,
    )
    head = build_head(text, config.tie_word_embeddings)
    return vision_language_model(vision, projector, text, head, config.text.initializer_range)


def vision_shape(config: InternVLConfig) -> VisionShape:
    vision = config.vision
    return VisionShape(
        patch_values=vision.patch_values,
        hidden=vision.hidden_size,
        intermediate=vision.intermediate_size,
        layers=vision.num_hidden_layers,
        heads=vision.num_attention_heads,
        merge=vision.spatial_merge_size,
        activation=vision.hidden_act,
        norm="rms" if vision.norm_type == "rms_norm" else "layer",
        norm_eps=vision.layer_norm_eps,
        patch_bias=True,
        qkv_bias=vision.attention_bias,
        qk_norm=vision.use_qk_norm,
        layer_scale=vision.layer_scale_init_value,
        rope_theta=None,
        positions=vision.tile_patches,
        class_token=True,
        norm_after=not vision.use_mean_pooling,
        attention=config.attention,
    )


EVEN = 8  # a common tensor-parallel degree


def _whole_tables(config: InternVLConfig) -> dict[str, TensorStyle]:
    """Return styles that replicate vocabularies of a size that does not shard evenly (published: 151674, 92553)."""
    if config.text.vocab_size % EVEN == 0:
        return {}
    styles = text_styles(config.text, config.tie_word_embeddings)
    return {name: "replicate" for name, style in styles.items() if style == "vocab"}


def plan(config: InternVLConfig) -> ModelPlan:
    return vision_language_plan(
        config.text,
        costs(config),
        {**merger_styles(), **_whole_tables(config)},
        tied=config.tie_word_embeddings,
        per_token=config.vision.spatial_merge_size**2 + 1,  # with the class token of each tile
    )


def costs(config: InternVLConfig) -> VisionCosts:
    """Return the sizes from which the FLOPs of encoder and projector follow."""
    vision = config.vision
    hidden = config.text.hidden_size
    projector = (vision.hidden_size * vision.spatial_merge_size**2 + hidden) * hidden
    return VisionCosts(vision_shape(config), projector, vision.tile_patches, vision.tile_tokens)
