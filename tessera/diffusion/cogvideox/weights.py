"""Parameter names of CogVideoX in diffusers folders, and in jobs of MindSpeed-MM."""

from __future__ import annotations

from tessera.diffusion.cogvideox.config import CogVideoXConfig
from tessera.weights.map import GroupedRows, Reshape, Rule, TensorChunk, WeightMap
from tessera.weights.megatron_form import COLUMNS, QUERIES_KEYS_VALUES, ROWS, MegatronForm, PipelinePart

_PAIRS = (
    ("embed.latents.{kind}", "patch_embed.proj.{kind}"),
    ("embed.text.{kind}", "patch_embed.text_proj.{kind}"),
    ("embed.time.up.{kind}", "time_embedding.linear_1.{kind}"),
    ("embed.time.down.{kind}", "time_embedding.linear_2.{kind}"),
    ("embed.offset.up.{kind}", "ofs_embedding.linear_1.{kind}"),
    ("embed.offset.down.{kind}", "ofs_embedding.linear_2.{kind}"),
    ("blocks.{i}.attn_modulation.{kind}", "transformer_blocks.{i}.norm1.linear.{kind}"),
    ("blocks.{i}.attn_norm.{kind}", "transformer_blocks.{i}.norm1.norm.{kind}"),
    ("blocks.{i}.attn.qkv.{x}.{kind}", "transformer_blocks.{i}.attn1.to_{x}.{kind}"),
    ("blocks.{i}.attn.{x}_norm.{kind}", "transformer_blocks.{i}.attn1.norm_{x}.{kind}"),
    ("blocks.{i}.attn.out.{kind}", "transformer_blocks.{i}.attn1.to_out.0.{kind}"),
    ("blocks.{i}.mlp_modulation.{kind}", "transformer_blocks.{i}.norm2.linear.{kind}"),
    ("blocks.{i}.mlp_norm.{kind}", "transformer_blocks.{i}.norm2.norm.{kind}"),
    ("blocks.{i}.mlp.up.{kind}", "transformer_blocks.{i}.ff.net.0.proj.{kind}"),
    ("blocks.{i}.mlp.down.{kind}", "transformer_blocks.{i}.ff.net.2.{kind}"),
    ("head.norm.{kind}", "norm_final.{kind}"),
    ("head.modulation.{kind}", "norm_out.linear.{kind}"),
    ("head.modulated_norm.{kind}", "norm_out.norm.{kind}"),
    ("head.proj.{kind}", "proj_out.{kind}"),
)


def weights(config: CogVideoXConfig) -> WeightMap:
    """Return the weight map. Patches of one frame are embedded by a convolution in folders."""
    size, rules = config.hidden_size, [Rule(native, foreign) for native, foreign in _PAIRS]
    if config.patch_size_t is None:
        patch = (config.in_channels, config.patch_size, config.patch_size)
        flat = Reshape((size, config.in_channels * config.patch_size**2), (size, *patch))
        rules.insert(0, Rule("embed.latents.weight", "patch_embed.proj.weight", flat))
    if config.use_learned_positional_embeddings:
        places = config.learned_places
        table = Reshape((places, size), (1, places, size))
        rules.append(Rule("embed.places.weight", "patch_embed.pos_embedding", table))
    return WeightMap(tuple(rules))


_BLOCK = "videodit_blocks.{i}."
_JOB_PAIRS = (
    ("embed.latents.{kind}", "patch_embed.proj.{kind}"),
    ("embed.text.{kind}", "caption_projection.{kind}"),
    ("embed.time.up.{kind}", "time_embed.time_embed.0.{kind}"),
    ("embed.time.down.{kind}", "time_embed.time_embed.2.{kind}"),
    ("embed.offset.up.{kind}", "ofs_embed.0.{kind}"),
    ("embed.offset.down.{kind}", "ofs_embed.2.{kind}"),
    ("blocks.{i}.attn_norm.{kind}", _BLOCK + "norm1.{kind}"),
    ("blocks.{i}.attn.{x}_norm.{kind}", _BLOCK + "self_atten.{x}_norm.{kind}"),
    ("blocks.{i}.attn.out.{kind}", _BLOCK + "self_atten.proj_out.{kind}"),
    ("blocks.{i}.mlp_norm.{kind}", _BLOCK + "norm2.{kind}"),
    ("blocks.{i}.mlp.up.{kind}", _BLOCK + "ff.net.0.proj.{kind}"),
    ("blocks.{i}.mlp.down.{kind}", _BLOCK + "ff.net.2.{kind}"),
    ("head.norm.{kind}", "norm_final.{kind}"),
    ("head.modulation.{kind}", "adaLN_modulation.1.{kind}"),
    ("head.modulated_norm.{kind}", "norm_out.{kind}"),
    ("head.proj.{kind}", "proj_out_linear.{kind}"),
)
_ANY_BLOCK = r"videodit_blocks\.\d+\."
JOB_SPLITS = (
    (r"adaLN_modulation\.1\.(weight|bias)", ROWS),
    (_ANY_BLOCK + r"(ff\.net\.0\.proj|scale_shift_table\.1)\.(weight|bias)", ROWS),
    (_ANY_BLOCK + r"(self_atten\.proj_out|ff\.net\.2)\.weight", COLUMNS),
    (_ANY_BLOCK + r"self_atten\.proj_qkv\.(weight|bias)", QUERIES_KEYS_VALUES),
)
_FIRST = ("patch_embed.", "caption_projection.", "time_embed.", "ofs_embed.", "pos_embed.")
_LAST = ("norm_final.", "norm_out.", "proj_out_linear.", "adaLN_modulation.")


def megatron(config: CogVideoXConfig) -> MegatronForm:
    """Return the form in which jobs of MindSpeed-MM keep the transformer."""
    # A convolution over patches and a table of positions are stored as in folders.
    stored = [rule for rule in weights(config).rules if isinstance(rule.op, Reshape)]
    renamed = {"patch_embed.pos_embedding": "pos_embed.pos_embedding"}
    rules = [Rule(rule.native, renamed.get(str(rule.foreign), str(rule.foreign)), rule.op) for rule in stored]
    rules += [Rule(native, foreign) for native, foreign in _JOB_PAIRS]
    fused, table = _BLOCK + "self_atten.proj_qkv.{kind}", _BLOCK + "scale_shift_table.1.{kind}"
    for number, kind in enumerate("qkv"):
        rules.append(Rule(f"blocks.{{i}}.attn.qkv.{kind}.{{kind}}", fused, TensorChunk(number, 3)))
    # Shift, scale and gate of both modulations for latents, then those for text.
    three = 3 * config.hidden_size
    for number, name in enumerate(("attn", "mlp")):
        rules.append(
            Rule(f"blocks.{{i}}.{name}_modulation.{{kind}}", table, GroupedRows(number, 2, rows=(three, three)))
        )
    part = PipelinePart("dit", "videodit_blocks.", _FIRST, _LAST, config.num_layers)
    return MegatronForm(WeightMap(tuple(rules)), JOB_SPLITS, (part,), kv_heads=config.num_attention_heads)
