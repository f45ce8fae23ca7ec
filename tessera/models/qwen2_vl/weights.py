"""Our parameter names and those of Hugging Face folders.

The rules use the hub's spelling (`visual.*`, `model.layers.*`, `lm_head.weight`), which transformers writes and reads.
The renames accept the spellings of its modules in memory, and of a base model saved without its head.
"""

from __future__ import annotations

from tessera.core.weightmap import WeightMap
from tessera.models._text.weights import copies, head_rules, text_buffers, text_rules
from tessera.models._vision.weights import grid_tower_rules
from tessera.models.qwen2_vl.config import Qwen2VLConfig

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
    rules = [
        *grid_tower_rules(vision, vision.embed_dim, vision.num_heads, "visual.", _PAIRS),
        *text_rules(config.text),
    ]
    head, twice = head_rules(config.tie_word_embeddings)
    return WeightMap(
        (*rules, *head), _RENAMES, ("visual.rotary_pos_emb.inv_freq", *text_buffers(), *twice), copies=copies(twice)
    )
