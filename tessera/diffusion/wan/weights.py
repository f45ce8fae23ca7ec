"""Parameter names and configurations of Wan, in diffusers folders ("hf") and in original checkpoints ("original")."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from tessera.checkpoint.files import open_safetensors
from tessera.diffusion.wan.config import WanConfig
from tessera.errors import TesseraError
from tessera.models.text.hf import check_supported
from tessera.weights.layouts import folder_layout
from tessera.weights.map import Rule, WeightMap
from tessera.weights.operations import GroupByHead, Reshape

MODEL_TYPES = ("t2v", "i2v", "flf2v", "ti2v")
_IMAGE_WIDTH = 1280  # width of CLIP embeddings
_FIELDS = {
    "ffn_dim": "ffn_dim",
    "freq_dim": "freq_dim",
    "in_dim": "in_channels",
    "out_dim": "out_channels",
    "num_heads": "num_attention_heads",
    "num_layers": "num_layers",
    "text_dim": "text_dim",
    "eps": "eps",
    "patch_size": "patch_size",
    "cross_attn_norm": "cross_attn_norm",
}
# (parameter name in Tessera, in diffusers folders, in the original checkpoint).
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
    """Return the parameter names and shapes in diffusers folders."""
    # Early image-to-video files have a norm of queries that is not used.
    return WeightMap(_rules(config, 1), skip=("blocks.{i}.attn2.norm_added_q.weight",))


def original(config: WanConfig) -> WeightMap:
    """Return the parameter names and shapes in original checkpoints."""
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
        # Published models order the values of a predicted patch by position, then channel. Here channels come first.
        Rule("head.proj.{kind}", head, GroupByHead(config.out_channels, prod(config.patch_size))),
        *(Rule(names[0], names[column]) for names in _NAMES),
    ]
    if config.pos_embed_seq_len is not None and config.image_dim is not None:
        shape = (config.pos_embed_seq_len, config.image_dim)
        rules.append(Rule("embed.image.positions", positions, Reshape(shape, (1, *shape))))
    return tuple(rules)


def hf_config(folder: Path, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json in the format of diffusers for an original checkpoint. `data`: its own config.json."""
    where = f"config.json ({data.get('model_type')})"
    check_supported(
        [
            ("_class_name", data.get("_class_name", "WanModel"), ("WanModel",)),
            ("text_len", data.get("text_len", 512), (512,)),
            ("qk_norm", data.get("qk_norm", True), (True,)),
            ("window_size", list(data.get("window_size", (-1, -1))), ([-1, -1],)),
        ],
        where,
    )
    width, heads = data.get("dim", 2048), data.get("num_heads", 16)
    if not (isinstance(width, int) and isinstance(heads, int) and heads > 0 and width % heads == 0):
        raise TesseraError(
            f"dim {width!r} is not divisible by num_heads {heads!r}",
            where=where,
            code="model.heads-do-not-divide-width",
        )
    fields = {new: data[old] for old, new in _FIELDS.items() if old in data}
    defaults = {"num_attention_heads": 16, "num_layers": 32, "ffn_dim": 8192}
    # Only the weights show whether a model reads image embeddings. Wan 2.2 reads a first frame only as channels.
    if data.get("model_type") in ("i2v", "flf2v") and (names := _stored_names(folder)) & {"img_emb.proj.1.weight"}:
        fields |= {"image_dim": _IMAGE_WIDTH, "added_kv_proj_dim": width}
        if "img_emb.emb_pos" in names:
            fields["pos_embed_seq_len"] = 514
    return {"_class_name": WanConfig.class_name, **defaults, **fields, "attention_head_dim": width // heads}


def _stored_names(folder: Path) -> set[str]:
    """Return the names of all tensors in the safetensors files of a folder."""
    names: set[str] = set()
    for path in folder_layout(folder).weight_files():
        with open_safetensors(path) as file:
            names.update(file.keys())
    return names
