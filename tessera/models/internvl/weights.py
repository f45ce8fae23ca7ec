"""Our parameter names and those of Hugging Face folders.

The rules use the hub's first spelling (`language_model.model.*`, `vision_tower.*`), which transformers writes and
reads. The renames accept the spellings of its modules in memory, which later folders on the hub have as well, and of a
base model saved without its head.
"""

from __future__ import annotations

from tessera.core.weightmap import GroupByHead, Reshape, Rule, WeightMap
from tessera.models._text.weights import copies, head_rules, text_buffers, text_rules
from tessera.models.internvl.config import InternVLConfig

TEXT = "language_model.model."
_BLOCK = "vision_tower.encoder.layer.{i}."
_PAIRS = (
    ("vision.patch_embed.bias", "vision_tower.embeddings.patch_embeddings.projection.bias"),
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
    (TEXT, TEXT),
    ("language_model.lm_head.", "language_model.lm_head."),
    ("lm_head.", "language_model.lm_head."),
    ("model.language_model.", TEXT),
    ("model.vision_tower.", "vision_tower."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
    ("language_model.", TEXT),
)


def weights(config: InternVLConfig) -> WeightMap:
    vision = config.vision
    hidden, patch = vision.hidden_size, vision.patch_size
    as_convolution = Reshape((hidden, vision.patch_values), (hidden, vision.num_channels, patch, patch))
    as_table = Reshape((vision.tile_rows, hidden), (1, vision.tile_rows, hidden))
    kinds = tuple(f"{_BLOCK}attention.{kind}_proj.{{kind}}" for kind in "qkv")
    rules = [
        Rule("vision.patch_embed.weight", "vision_tower.embeddings.patch_embeddings.projection.weight", as_convolution),
        Rule("vision.table.weight", "vision_tower.embeddings.position_embeddings", as_table),
        Rule("vision.table.class_token", "vision_tower.embeddings.cls_token", Reshape((hidden,), (1, 1, hidden))),
        Rule("vision.blocks.{i}.attn.qkv.{kind}", kinds, GroupByHead(vision.num_attention_heads, apart=True)),
        *(Rule(ours, theirs) for ours, theirs in _PAIRS),
        *text_rules(config.text, TEXT),
    ]
    head, twice = head_rules(config.tie_word_embeddings, "language_model.lm_head.weight")
    return WeightMap((*rules, *head), _RENAMES, (*text_buffers(TEXT), *twice), copies=copies(twice))
