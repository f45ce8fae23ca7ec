"""InternVL from the common blocks."""

from __future__ import annotations

from tessera.models._text.build import build_head, build_text
from tessera.models.internvl.config import InternVLConfig
from tessera.nn.projector import PatchMerger
from tessera.nn.vit import VisionShape, VisionTower
from tessera.nn.vlm import VisionLanguageModel

PROJECTOR_EPS = 1e-5


def build(config: InternVLConfig) -> VisionLanguageModel:
    vision, text = VisionTower(vision_shape(config)), build_text(config.text, config.attention)
    projector = PatchMerger(
        vision.shape.hidden,
        vision.shape.merge,
        text.shape.hidden,
        PROJECTOR_EPS,
        inner=text.shape.hidden,
        norm_joined=True,
    )
    head = build_head(text, config.tie_word_embeddings)
    return VisionLanguageModel(vision, projector, text, head, config.text.initializer_range)


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
        positions=vision.tile_rows,
        class_token=True,
        norm_after=not vision.use_mean_pooling,
        attention=config.attention,
    )
