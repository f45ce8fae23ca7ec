"""InternVL: its vision encoder and projector from the blocks in `nn`, with images cut into tiles of one size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from tessera.config.reader import Section
from tessera.core.batch import Batch
from tessera.core.model_plan import TensorStyle
from tessera.models.internvl.config import InternVLConfig
from tessera.models.internvl.original import MODEL_TYPE, embedding_rules, hf_config, internlm_weights, original_weights
from tessera.models.text.costs import example_batch
from tessera.models.text.decoder import language_weights, text_styles
from tessera.models.vision.costs import example_with_media
from tessera.models.vision.family import VisionFamily
from tessera.nn.projector import PatchMerger
from tessera.nn.vit import VisionShape
from tessera.weights.map import Rule, WeightMap
from tessera.weights.operations import GroupByHead

PROJECTOR_EPS = 1e-5
EVEN = 8  # if this does not divide the vocabulary size, tensor-parallel ranks replicate embedding and head
# Parameter names in the first published folders, which transformers reads and writes. `_RENAMES` also accepts the names
# of transformers' modules, which later folders have, and a base model that was saved without its head.
_TEXT = "language_model.model."
_EMBEDDINGS = "vision_tower.embeddings."
_BLOCK = "vision_tower.encoder.layer.{i}."
_PAIRS = (
    ("vision.patch_embed.bias", _EMBEDDINGS + "patch_embeddings.projection.bias"),
    ("vision.blocks.{i}.attn_norm.{kind}", _BLOCK + "layernorm_before.{kind}"),
    ("vision.blocks.{i}.attn.q_norm.weight", _BLOCK + "attention.q_norm.weight"),
    ("vision.blocks.{i}.attn.k_norm.weight", _BLOCK + "attention.k_norm.weight"),
    ("vision.blocks.{i}.attn.proj.{kind}", _BLOCK + "attention.projection_layer.{kind}"),
    ("vision.blocks.{i}.attn_scale.weight", _BLOCK + "lambda_1"),
    ("vision.blocks.{i}.mlp_norm.{kind}", _BLOCK + "layernorm_after.{kind}"),
    ("vision.blocks.{i}.mlp.up.{kind}", _BLOCK + "mlp.fc1.{kind}"),
    ("vision.blocks.{i}.mlp.down.{kind}", _BLOCK + "mlp.fc2.{kind}"),
    ("vision.blocks.{i}.mlp_scale.weight", _BLOCK + "lambda_2"),
    ("vision.norm_after.{kind}", "vision_tower.layernorm.{kind}"),
    ("projector.norm.{kind}", "multi_modal_projector.layer_norm.{kind}"),
    ("projector.up.{kind}", "multi_modal_projector.linear_1.{kind}"),
    ("projector.down.{kind}", "multi_modal_projector.linear_2.{kind}"),
)
_RENAMES = (
    (_TEXT, _TEXT),
    ("language_model.lm_head.", "language_model.lm_head."),
    ("lm_head.", "language_model.lm_head."),
    ("model.language_model.", _TEXT),
    ("model.vision_tower.", "vision_tower."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
    ("language_model.", _TEXT),
)


class InternVL(VisionFamily):
    name: ClassVar[str] = "internvl"
    config: ClassVar[type[Section]] = InternVLConfig
    processor: ClassVar[str] = "InternVLProcessor"
    # InternLM2 must be tried first, because its folders also match the second format.
    other_weights: ClassVar[Mapping[str, Callable[[Any], WeightMap]]] = {
        "internlm2": internlm_weights,
        "original": original_weights,
    }
    originals: ClassVar[Mapping[str, Callable[[Path, Mapping[str, Any]], dict[str, Any]]]] = {MODEL_TYPE: hf_config}

    def shape(self, config: InternVLConfig) -> VisionShape:
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

    def projector(self, config: InternVLConfig, shape: VisionShape) -> nn.Module:
        hidden = config.text.hidden_size
        return PatchMerger(shape.hidden, shape.merge, hidden, PROJECTOR_EPS, inner=hidden, norm_joined=True)

    def weights(self, config: InternVLConfig) -> WeightMap:
        names = ("patch_embeddings.projection.weight", "position_embeddings", "cls_token")
        kinds = tuple(f"{_BLOCK}attention.{kind}_proj.{{kind}}" for kind in "qkv")
        heads = config.vision.num_attention_heads
        rules = [
            *embedding_rules(config, *(_EMBEDDINGS + name for name in names)),
            Rule("vision.blocks.{i}.attn.qkv.{kind}", kinds, GroupByHead(heads, separate=True)),
            *(Rule(native, foreign) for native, foreign in _PAIRS),
        ]
        tied, head = config.tie_word_embeddings, "language_model.lm_head.weight"
        return language_weights(config.text, tied, rules, prefix=_TEXT, head=head, renames=_RENAMES)

    def tokens_of_patches(self, config: InternVLConfig) -> tuple[int, int]:
        return config.vision.tile_patches, config.vision.tile_tokens

    def most_patches(self, config: InternVLConfig) -> int:
        return config.vision.spatial_merge_size**2 + 1  # patches of a token, and the class token of each tile

    def styles(self, config: InternVLConfig) -> dict[str, TensorStyle]:
        """Replicate embedding and head if `EVEN` does not divide the vocabulary size, such as the published 92553."""
        if config.text.vocab_size % EVEN == 0:
            return {}
        styles = text_styles(config.text, config.tie_word_embeddings)
        return {name: "replicate" for name, style in styles.items() if style == "vocab"}

    def example(self, config: InternVLConfig, tokens: int) -> Batch:
        """Return a batch in which image tiles make up about a quarter of `tokens`. If none fits, it has only text."""
        vision = config.vision
        tiles = max(tokens // (4 * vision.tile_tokens), 1 if tokens > vision.tile_tokens else 0)
        if not tiles:
            return example_batch(tokens)
        patches = torch.arange(tiles * vision.tile_patches)
        media = {
            "pixels": torch.zeros(len(patches), vision.patch_values),
            "patch_index": patches % vision.tile_patches,
            "media_patches": patches.view(tiles, -1)[:, 1:].flatten(),
            "media_slots": torch.arange(tiles * vision.tile_tokens),
        }
        return example_with_media(tokens, media, [vision.tile_patches] * tiles)
