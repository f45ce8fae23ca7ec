"""Parameter names of Wan in diffusers folders ("hf") and in the original checkpoints ("original")."""

from __future__ import annotations

from math import prod

from tessera.diffusion.wan.config import WanConfig
from tessera.weights.map import GroupByHead, Reshape, Rule, WeightMap

# Native name, name in diffusers folders, name in the original checkpoint.
_NAMES = (
    ("embed.patch.bias", "patch_embedding.bias", "patch_embedding.bias"),
    ("embed.time.up.{kind}", "condition_embedder.time_embedder.linear_1.{kind}", "time_embedding.0.{kind}"),
    ("embed.time.down.{kind}", "condition_embedder.time_embedder.linear_2.{kind}", "time_embedding.2.{kind}"),
    ("embed.modulation.{kind}", "condition_embedder.time_proj.{kind}", "time_projection.1.{kind}"),
    ("embed.text.up.{kind}", "condition_embedder.text_embedder.linear_1.{kind}", "text_embedding.0.{kind}"),
    ("embed.text.down.{kind}", "condition_embedder.text_embedder.linear_2.{kind}", "text_embedding.2.{kind}"),
    ("embed.image.norm_in.{kind}", "condition_embedder.image_embedder.norm1.{kind}", "img_emb.proj.0.{kind}"),
    ("embed.image.mlp.up.{kind}", "condition_embedder.image_embedder.ff.net.0.proj.{kind}", "img_emb.proj.1.{kind}"),
    ("embed.image.mlp.down.{kind}", "condition_embedder.image_embedder.ff.net.2.{kind}", "img_emb.proj.3.{kind}"),
    ("embed.image.norm_out.{kind}", "condition_embedder.image_embedder.norm2.{kind}", "img_emb.proj.4.{kind}"),
    ("blocks.{i}.attn.qkv.q.{kind}", "blocks.{i}.attn1.to_q.{kind}", "blocks.{i}.self_attn.q.{kind}"),
    ("blocks.{i}.attn.qkv.k.{kind}", "blocks.{i}.attn1.to_k.{kind}", "blocks.{i}.self_attn.k.{kind}"),
    ("blocks.{i}.attn.qkv.v.{kind}", "blocks.{i}.attn1.to_v.{kind}", "blocks.{i}.self_attn.v.{kind}"),
    ("blocks.{i}.attn.q_norm.weight", "blocks.{i}.attn1.norm_q.weight", "blocks.{i}.self_attn.norm_q.weight"),
    ("blocks.{i}.attn.k_norm.weight", "blocks.{i}.attn1.norm_k.weight", "blocks.{i}.self_attn.norm_k.weight"),
    ("blocks.{i}.attn.out.{kind}", "blocks.{i}.attn1.to_out.0.{kind}", "blocks.{i}.self_attn.o.{kind}"),
    ("blocks.{i}.cross_norm.{kind}", "blocks.{i}.norm2.{kind}", "blocks.{i}.norm3.{kind}"),
    ("blocks.{i}.cross.q.{kind}", "blocks.{i}.attn2.to_q.{kind}", "blocks.{i}.cross_attn.q.{kind}"),
    ("blocks.{i}.cross.kv.k.{kind}", "blocks.{i}.attn2.to_k.{kind}", "blocks.{i}.cross_attn.k.{kind}"),
    ("blocks.{i}.cross.kv.v.{kind}", "blocks.{i}.attn2.to_v.{kind}", "blocks.{i}.cross_attn.v.{kind}"),
    ("blocks.{i}.cross.q_norm.weight", "blocks.{i}.attn2.norm_q.weight", "blocks.{i}.cross_attn.norm_q.weight"),
    ("blocks.{i}.cross.k_norm.weight", "blocks.{i}.attn2.norm_k.weight", "blocks.{i}.cross_attn.norm_k.weight"),
    ("blocks.{i}.cross.image_kv.k.{kind}", "blocks.{i}.attn2.add_k_proj.{kind}", "blocks.{i}.cross_attn.k_img.{kind}"),
    ("blocks.{i}.cross.image_kv.v.{kind}", "blocks.{i}.attn2.add_v_proj.{kind}", "blocks.{i}.cross_attn.v_img.{kind}"),
    (
        "blocks.{i}.cross.image_norm.weight",
        "blocks.{i}.attn2.norm_added_k.weight",
        "blocks.{i}.cross_attn.norm_k_img.weight",
    ),
    ("blocks.{i}.cross.out.{kind}", "blocks.{i}.attn2.to_out.0.{kind}", "blocks.{i}.cross_attn.o.{kind}"),
    ("blocks.{i}.mlp.up.{kind}", "blocks.{i}.ffn.net.0.proj.{kind}", "blocks.{i}.ffn.0.{kind}"),
    ("blocks.{i}.mlp.down.{kind}", "blocks.{i}.ffn.net.2.{kind}", "blocks.{i}.ffn.2.{kind}"),
)


def weights(config: WanConfig) -> WeightMap:
    """Return the names and shapes of diffusers folders."""
    # Old files of images have an unused norm of queries.
    return WeightMap(_rules(config, 1), skip=("blocks.{i}.attn2.norm_added_q.weight",))


def original(config: WanConfig) -> WeightMap:
    """Return the names and shapes of the original checkpoint."""
    return WeightMap(_rules(config, 2), mark="time_embedding.0.weight")


def _rules(config: WanConfig, column: int) -> tuple[Rule, ...]:
    patch, hidden = (config.in_channels, *config.patch_size), config.hidden
    table, head, positions = (
        ("blocks.{i}.modulation", "head.head.{kind}", "img_emb.emb_pos")
        if column == 2
        else ("blocks.{i}.scale_shift_table", "proj_out.{kind}", "condition_embedder.image_embedder.pos_embed")
    )
    last = "head.modulation" if column == 2 else "scale_shift_table"
    rules = [
        Rule("embed.patch.weight", "patch_embedding.weight", Reshape((hidden, config.patch_values), (hidden, *patch))),
        Rule("blocks.{i}.modulation.table", table, Reshape((6, hidden), (1, 6, hidden))),
        Rule("head.modulation.table", last, Reshape((2, hidden), (1, 2, hidden))),
        # Outputs of the published models are ordered by place in the patch, then by channel; here, as inputs are.
        Rule("head.proj.{kind}", head, GroupByHead(config.out_channels, prod(config.patch_size))),
        *(Rule(names[0], names[column]) for names in _NAMES),
    ]
    if config.pos_embed_seq_len is not None and config.image_dim is not None:
        shape = (config.pos_embed_seq_len, config.image_dim)
        rules.append(Rule("embed.image.positions", positions, Reshape(shape, (1, *shape))))
    return tuple(rules)
