"""Parameter names of GLM-4.1V in Hugging Face folders, which are those of transformers' modules in memory.

The renames accept a base model saved without its head.
"""

from __future__ import annotations

from tessera.models.glm4v.config import Glm4vConfig
from tessera.models.text.decoder import language_weights
from tessera.models.vision.family import grid_tower_rules
from tessera.weights.map import ConvToLinear, InterleavedToHalfRope, Rule, TensorChunk, WeightMap

_VISION = (
    ("vision.patch_embed.bias", "patch_embed.proj.bias"),
    ("vision.norm_patches.weight", "post_conv_layernorm.weight"),
    ("vision.table.weight", "embeddings.position_embedding.weight"),
    ("vision.blocks.{i}.attn_norm.weight", "blocks.{i}.norm1.weight"),
    ("vision.blocks.{i}.attn.proj.weight", "blocks.{i}.attn.proj.weight"),
    ("vision.blocks.{i}.mlp_norm.weight", "blocks.{i}.norm2.weight"),
    ("vision.blocks.{i}.mlp.{part}.weight", "blocks.{i}.mlp.{part}_proj.weight"),
    ("vision.norm_after.weight", "post_layernorm.weight"),
    ("projector.downsample.bias", "downsample.bias"),
    ("projector.proj.weight", "merger.proj.weight"),
    ("projector.norm.{kind}", "merger.post_projection_norm.{kind}"),
    ("projector.{part}.weight", "merger.{part}_proj.weight"),
)
_TEXT = "model.language_model."
_LAYER = _TEXT + "layers.{i}."
_RENAMES = (("visual.", "model.visual."), ("language_model.", _TEXT))
_BUFFERS = ("model.visual.rotary_pos_emb.inv_freq", "model.visual.embeddings.position_ids")


def weights(config: Glm4vConfig) -> WeightMap:
    vision, text = config.vision, config.text
    as_blocks = ConvToLinear(vision.spatial_merge_size)
    to_half_rope = InterleavedToHalfRope(text.head_size, text.rotary_dim)
    gate_up = _LAYER + "mlp.gate_up_proj.weight"
    rules = [
        Rule("projector.downsample.weight", "model.visual.downsample.weight", as_blocks),
        *grid_tower_rules(vision, vision.hidden_size, vision.num_heads, "model.visual.", _VISION),
        Rule("text.layers.{i}.attn.q.{kind}", _LAYER + "self_attn.q_proj.{kind}", to_half_rope),
        Rule("text.layers.{i}.attn.k.{kind}", _LAYER + "self_attn.k_proj.{kind}", to_half_rope),
        Rule("text.layers.{i}.attn_out_norm.weight", _LAYER + "post_self_attn_layernorm.weight"),
        Rule("text.layers.{i}.mlp_out_norm.weight", _LAYER + "post_mlp_layernorm.weight"),
        Rule("text.layers.{i}.mlp.gate.weight", gate_up, TensorChunk(0, 2)),
        Rule("text.layers.{i}.mlp.up.weight", gate_up, TensorChunk(1, 2)),
    ]
    return language_weights(text, config.tie_word_embeddings, rules, prefix=_TEXT, renames=_RENAMES, ignored=_BUFFERS)
