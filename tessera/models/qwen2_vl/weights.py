"""Parameter names of Qwen2-VL in Hugging Face folders.

The rules use the hub's names (`visual.*`, `model.layers.*`, `lm_head.weight`), which transformers writes and reads. The
renames accept the names of its modules in memory, and of a base model saved without its head.
"""

from __future__ import annotations

from tessera.models.qwen2_vl.config import Qwen2VLConfig
from tessera.models.text.decoder import language_weights
from tessera.models.vision.family import grid_tower_rules
from tessera.weights.map import WeightMap

_PAIRS = (
    ("vision.blocks.{i}.attn_norm.{kind}", "blocks.{i}.norm1.{kind}"),
    ("vision.blocks.{i}.attn.proj.{kind}", "blocks.{i}.attn.proj.{kind}"),
    ("vision.blocks.{i}.mlp_norm.{kind}", "blocks.{i}.norm2.{kind}"),
    ("vision.blocks.{i}.mlp.up.{kind}", "blocks.{i}.mlp.fc1.{kind}"),
    ("vision.blocks.{i}.mlp.down.{kind}", "blocks.{i}.mlp.fc2.{kind}"),
    ("projector.norm.{kind}", "merger.ln_q.{kind}"),
    ("projector.up.{kind}", "merger.mlp.0.{kind}"),
    ("projector.down.{kind}", "merger.mlp.2.{kind}"),
)
_RENAMES = (
    ("model.visual.", "visual."),
    ("model.language_model.", "model."),
    ("language_model.", "model."),
)


def weights(config: Qwen2VLConfig) -> WeightMap:
    vision = config.vision
    return language_weights(
        config.text,
        config.tie_word_embeddings,
        grid_tower_rules(vision, vision.embed_dim, vision.num_heads, "visual.", _PAIRS),
        renames=_RENAMES,
        ignored=("visual.rotary_pos_emb.inv_freq",),
    )
