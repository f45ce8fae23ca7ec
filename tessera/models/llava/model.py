"""LLaVA: its vision encoder and projector from the blocks in `nn`, with images of one size or tiles of it."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from tessera.config.reader import Section
from tessera.core.batch import Batch
from tessera.models.llava.config import PLAIN_TYPE, TILED_TYPE, LlavaConfig
from tessera.models.text.decoder import language_weights
from tessera.models.vision.costs import EXAMPLE_IMAGES, example_with_media
from tessera.models.vision.family import VisionFamily
from tessera.nn.projector import MLPProjector
from tessera.nn.vit import VisionShape
from tessera.weights.map import Rule, WeightMap
from tessera.weights.operations import GroupByHead, Reshape

_PATCHES_OF_TILES = 2  # usual number of patches per visual token: an image is encoded twice, scaled down and in tiles
# Names in published folders, which transformers reads. `_RENAMES` also accepts the names that transformers writes now,
# the names of its modules in memory, and a base model saved without its head.
_TOWER = "vision_tower.vision_model."
_TEXT = "language_model.model."
_PAIRS = (
    ("vision.patch_embed.bias", "embeddings.patch_embedding.bias"),
    ("vision.table.weight", "embeddings.position_embedding.weight"),
    ("vision.table.class_token", "embeddings.class_embedding"),
    ("vision.norm_before.{kind}", "pre_layrnorm.{kind}"),
    ("vision.blocks.{i}.attn_norm.{kind}", "encoder.layers.{i}.layer_norm1.{kind}"),
    ("vision.blocks.{i}.attn.proj.{kind}", "encoder.layers.{i}.self_attn.out_proj.{kind}"),
    ("vision.blocks.{i}.mlp_norm.{kind}", "encoder.layers.{i}.layer_norm2.{kind}"),
    ("vision.blocks.{i}.mlp.up.{kind}", "encoder.layers.{i}.mlp.fc1.{kind}"),
    ("vision.blocks.{i}.mlp.down.{kind}", "encoder.layers.{i}.mlp.fc2.{kind}"),
    ("vision.norm_after.{kind}", "post_layernorm.{kind}"),
)
_PROJECTOR = (
    ("projector.up.{kind}", "multi_modal_projector.linear_1.{kind}"),
    ("projector.down.{kind}", "multi_modal_projector.linear_2.{kind}"),
    ("projector.newline", "image_newline"),
)
# The first matching prefix is replaced, so longer prefixes come first.
_RENAMES = (
    (_TEXT, _TEXT),
    ("language_model.lm_head.", "language_model.lm_head."),
    ("language_model.", _TEXT),
    (_TOWER, _TOWER),
    ("vision_tower.", _TOWER),
    ("model.vision_tower.vision_model.", _TOWER),
    ("model.vision_tower.", _TOWER),
    ("model.multi_modal_projector.", "multi_modal_projector."),
    ("model.image_newline", "image_newline"),
    ("model.language_model.", _TEXT),
    ("lm_head.", "language_model.lm_head."),
)


class Llava(VisionFamily):
    name: ClassVar[str] = "llava"
    config: ClassVar[type[Section]] = LlavaConfig
    processor: ClassVar[str] = "LlavaProcessor"
    hf_types: ClassVar[tuple[str, ...]] = (PLAIN_TYPE, TILED_TYPE)

    def shape(self, config: LlavaConfig) -> VisionShape:
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
            norm_after=True,  # the model does not use this norm, but every folder contains its weights
            num_blocks_used=config.blocks_read,
            attention=config.attention,
        )

    def projector(self, config: LlavaConfig, shape: VisionShape) -> nn.Module:
        return MLPProjector(
            shape.hidden,
            config.text.hidden_size,
            activation=config.projector_hidden_act,
            bias=config.multimodal_projector_bias,
            newline=config.tiles is not None,
        )

    def weights(self, config: LlavaConfig) -> WeightMap:
        vision = config.vision
        kernel = (vision.num_channels, vision.patch_size, vision.patch_size)
        as_convolution = Reshape((vision.hidden_size, vision.patch_values), (vision.hidden_size, *kernel))
        kinds = tuple(f"{_TOWER}encoder.layers.{{i}}.self_attn.{part}_proj.{{kind}}" for part in "qkv")
        rules = [
            Rule("vision.patch_embed.weight", _TOWER + "embeddings.patch_embedding.weight", as_convolution),
            Rule("vision.blocks.{i}.attn.qkv.{kind}", kinds, GroupByHead(vision.num_attention_heads, separate=True)),
            *(Rule(native, _TOWER + foreign) for native, foreign in _PAIRS),
            *(Rule(native, foreign) for native, foreign in _PROJECTOR),
        ]
        return language_weights(
            config.text,
            config.tie_word_embeddings,
            rules,
            prefix=_TEXT,
            head="language_model.lm_head.weight",
            renames=_RENAMES,
            ignored=(_TOWER + "embeddings.position_ids",),
        )

    def tokens_of_patches(self, config: LlavaConfig) -> tuple[int, int]:
        return config.vision.patches, config.features

    def most_patches(self, config: LlavaConfig) -> None:
        """Keep the vision encoder in one pipeline stage: the number of patches per token differs between images.

        The encoder is small compared to a text decoder that needs several stages.
        """
        return None

    def usual_patches(self, config: LlavaConfig) -> int:
        return 1 if config.tiles is None else _PATCHES_OF_TILES

    def example(self, config: LlavaConfig, tokens: int) -> Batch:
        """Return a batch in which images of a single tile make up about half of `tokens`.

        If `tokens` is too small for an image, the batch has only the first tokens of one.
        """
        patches, first = config.vision.patches, config.first_feature
        image_tokens = config.features + (config.tiles is not None)  # models with tiles add a newline embedding
        images = max(1, min(EXAMPLE_IMAGES, tokens // (2 * image_tokens)))
        used = min(images * image_tokens, tokens)
        features = torch.arange(images * patches).view(images, patches)[:, first:].flatten()
        media = {
            "pixels": torch.zeros(images * patches, config.vision.patch_values),
            "patch_index": torch.arange(patches).repeat(images),
            "media_slots": torch.arange(used),
            "media_patches": features[:used] if config.tiles is None else features,
        }
        if config.tiles is not None:
            numbers = torch.arange(1, images * config.features + 1).view(images, -1)
            media["media_index"] = torch.nn.functional.pad(numbers, (0, 1)).flatten()[:used]
        return example_with_media(tokens, media, [patches] * images)
