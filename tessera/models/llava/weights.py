"""Parameter names of LLaVA in Hugging Face folders.

The rules use the hub's names (`vision_tower.vision_model.*`, `language_model.model.*`), which transformers reads. The
renames accept what it writes now (without `vision_model`), the names of its modules in memory, and a base model saved
without its head.
"""

from __future__ import annotations

from tessera.models.llava.config import LlavaConfig
from tessera.models.text.decoder import language_weights
from tessera.weights.map import GroupByHead, Reshape, Rule, WeightMap

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
# The first match is used, so longer prefixes come first.
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


def weights(config: LlavaConfig) -> WeightMap:
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
