"""Parameter names of Qwen3-VL in Hugging Face folders, which are those of transformers' modules in memory.

The renames accept a base model saved without its head.
"""

from __future__ import annotations

from tessera.models.megatron import grid_megatron_form
from tessera.models.qwen3_vl.config import Qwen3VLConfig
from tessera.models.text.decoder import language_weights
from tessera.models.vision.family import grid_tower_rules
from tessera.weights.map import WeightMap
from tessera.weights.megatron_form import COLUMNS, ROWS, MegatronForm

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

_MEGATRON_PROJECTOR = (
    ("projector.last.norm.{kind}", "layernorm.{kind}"),
    ("projector.last.up.{kind}", "encoder.linear_fc1.{kind}"),
    ("projector.last.down.{kind}", "encoder.linear_fc2.{kind}"),
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


def megatron(config: Qwen3VLConfig) -> MegatronForm:
    """Return the form in which MindSpeed-MM keeps these models. A merger of features lies with the block it reads."""
    deep = "image_encoder.encoder.blocks.layers.{block}.deepstack_layer."
    more = [
        (f"projector.taps.{tap}.{native}.{{kind}}", deep.replace("{block}", str(block)) + f"{theirs}.{{kind}}")
        for tap, block in enumerate(config.vision.deepstack_visual_indexes)
        for native, theirs in (("norm", "layernorm"), ("up", "encoder.linear_fc1"), ("down", "encoder.linear_fc2"))
    ]
    return grid_megatron_form(
        config.text,
        config.tie_word_embeddings,
        config.vision,
        config.vision.hidden_size,
        config.vision.depth,
        gated=False,
        projector=_MEGATRON_PROJECTOR,
        more=more,
        extra_splits=(
            (r".*\.deepstack_layer\.encoder\.linear_fc1\.(weight|bias)", ROWS),
            (r".*\.deepstack_layer\.encoder\.linear_fc2\.weight", COLUMNS),
        ),
    )
