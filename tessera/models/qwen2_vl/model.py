"""Qwen2-VL from the common blocks."""

from __future__ import annotations

from torch import nn

from tessera.models.qwen2_vl.config import Qwen2VLConfig
from tessera.nn.decoder import DecoderShape, TextDecoder
from tessera.nn.embedding import TiedHead
from tessera.nn.projector import PatchMerger
from tessera.nn.vit import VisionShape, VisionTower
from tessera.nn.vlm import VisionLanguageModel


def build(config: Qwen2VLConfig) -> VisionLanguageModel:
    vision, text = VisionTower(vision_shape(config)), TextDecoder(text_shape(config))
    projector = PatchMerger(vision.shape.hidden, vision.shape.merge, text.shape.hidden)
    head = (
        TiedHead(text.embed)
        if config.tie_word_embeddings
        else nn.Linear(text.shape.hidden, text.shape.vocab, bias=False)
    )
    return VisionLanguageModel(vision, projector, text, head, config.text.initializer_range)


def text_shape(config: Qwen2VLConfig) -> DecoderShape:
    text = config.text
    return DecoderShape(
        vocab=text.vocab_size,
        hidden=text.hidden_size,
        intermediate=text.intermediate_size,
        layers=text.num_hidden_layers,
        heads=text.num_attention_heads,
        kv_heads=text.num_key_value_heads,
        head_dim=text.head_size,
        norm_eps=text.rms_norm_eps,
        rope_theta=text.rope_theta,
        rope_sections=text.mrope_section,
        qkv_bias=True,
        attention=config.attention,
    )


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
