"""Parameter names of Qwen3-VL in Hugging Face folders, which are those of transformers' modules in memory.

The renames accept a base model saved without its head.
"""

from __future__ import annotations

from tessera.models.qwen3_vl.config import Qwen3VLConfig
from tessera.models.text.decoder import language_weights
from tessera.models.vision.family import grid_tower_rules
from tessera.weights.map import WeightMap

_TEXT = "model.language_model."
_PAIRS = (
    ("vision.patch_embed.bias", "patch_embed.proj.bias"),
    ("vision.table.weight", "pos_embed.weight"),
    ("vision.blocks.{i}.attn_norm.{kind}", "blocks.{i}.norm1.{kind}"),
    ("vision.blocks.{i}.attn.proj.{kind}", "blocks.{i}.attn.proj.{kind}"),
    ("vision.blocks.{i}.mlp_norm.{kind}", "blocks.{i}.norm2.{kind}"),
    ("vision.blocks.{i}.mlp.up.{kind}", "blocks.{i}.mlp.linear_fc1.{kind}"),
    ("vision.blocks.{i}.mlp.down.{kind}", "blocks.{i}.mlp.linear_fc2.{kind}"),
    ("projector.last.norm.{kind}", "merger.norm.{kind}"),
    ("projector.last.up.{kind}", "merger.linear_fc1.{kind}"),
    ("projector.last.down.{kind}", "merger.linear_fc2.{kind}"),
    ("projector.taps.{i}.norm.{kind}", "deepstack_merger_list.{i}.norm.{kind}"),
    ("projector.taps.{i}.up.{kind}", "deepstack_merger_list.{i}.linear_fc1.{kind}"),
    ("projector.taps.{i}.down.{kind}", "deepstack_merger_list.{i}.linear_fc2.{kind}"),
)
_RENAMES = (
    ("visual.", "model.visual."),
    ("language_model.", _TEXT),
)


def weights(config: Qwen3VLConfig) -> WeightMap:
    vision, prefix = config.vision, "model.visual."
    return language_weights(
        config.text,
        config.tie_word_embeddings,
        grid_tower_rules(vision, vision.hidden_size, vision.num_heads, prefix, _PAIRS),
        prefix=_TEXT,
        stacked=True,
        renames=_RENAMES,
        ignored=(prefix + "rotary_pos_emb.inv_freq",),
    )
