"""Names and splits of video models in the rank files of MindSpeed-MM jobs, one function per family."""

from __future__ import annotations

from tessera.diffusion.cogvideox import weights as cogvideox_weights
from tessera.diffusion.cogvideox.config import CogVideoXConfig
from tessera.diffusion.hunyuan_video.config import HunyuanVideoConfig
from tessera.diffusion.hunyuan_video.weights import original as hunyuan_original
from tessera.diffusion.joint import plain_rules
from tessera.diffusion.wan.config import WanConfig
from tessera.diffusion.wan.weights import original as wan_original
from tessera.weights.map import Rule, WeightMap
from tessera.weights.operations import ColumnsByHead, GroupedRows, Reshape, SwappedHalves, TensorChunk
from tessera_compat.shards.form import COLUMNS, QUERIES_KEYS_VALUES, ROWS, JoinedColumns, MegatronForm, PipelinePart

# (part of a name in the original checkpoint, the same part in MindSpeed-MM).
_WAN_NAMES = (
    *((f"text_embedding.{number}.", f"text_embedding.linear_{number // 2 + 1}.") for number in (0, 2)),
    *((f"_attn.{kind}.", f"_attn.proj_{kind}.") for kind in "qkv"),
    ("_attn.o.", "_attn.proj_out."),
    ("_attn.norm_k_img.", "_attn.k_norm_img."),
    *((f"_attn.norm_{kind}.", f"_attn.{kind}_norm.") for kind in "qk"),
)
_WAN_FIRST = ("patch_embedding.", "text_embedding.", "time_embedding.", "time_projection.", "img_emb.")


def wan(config: WanConfig) -> MegatronForm:
    """Describe the rank files of Wan, which tensor parallelism does not split."""
    rules = []
    for rule in wan_original(config).rules:
        (name,) = rule.foreign_names()
        for theirs, job in _WAN_NAMES:
            name = name.replace(theirs, job)
        rules.append(Rule(rule.native, name, rule.op))
    part = PipelinePart("dit", "blocks.", _WAN_FIRST, ("head.",), config.num_layers)
    return MegatronForm(WeightMap(tuple(rules)), (), (part,), kv_heads=1)


_COG_BLOCK = "videodit_blocks.{i}."
_COG_PAIRS = (
    ("embed.latents.{kind}", "patch_embed.proj.{kind}"),
    ("embed.text.{kind}", "caption_projection.{kind}"),
    ("embed.time.up.{kind}", "time_embed.time_embed.0.{kind}"),
    ("embed.time.down.{kind}", "time_embed.time_embed.2.{kind}"),
    ("embed.offset.up.{kind}", "ofs_embed.0.{kind}"),
    ("embed.offset.down.{kind}", "ofs_embed.2.{kind}"),
    ("blocks.{i}.attn_norm.{kind}", _COG_BLOCK + "norm1.{kind}"),
    ("blocks.{i}.attn.{x}_norm.{kind}", _COG_BLOCK + "self_atten.{x}_norm.{kind}"),
    ("blocks.{i}.attn.out.{kind}", _COG_BLOCK + "self_atten.proj_out.{kind}"),
    ("blocks.{i}.mlp_norm.{kind}", _COG_BLOCK + "norm2.{kind}"),
    ("blocks.{i}.mlp.up.{kind}", _COG_BLOCK + "ff.net.0.proj.{kind}"),
    ("blocks.{i}.mlp.down.{kind}", _COG_BLOCK + "ff.net.2.{kind}"),
    ("head.norm.{kind}", "norm_final.{kind}"),
    ("head.modulation.{kind}", "adaLN_modulation.1.{kind}"),
    ("head.modulated_norm.{kind}", "norm_out.{kind}"),
    ("head.proj.{kind}", "proj_out_linear.{kind}"),
)
_COG_ANY_BLOCK = r"videodit_blocks\.\d+\."
COGVIDEOX_SPLITS = (
    (r"adaLN_modulation\.1\.(weight|bias)", ROWS),
    (_COG_ANY_BLOCK + r"(ff\.net\.0\.proj|scale_shift_table\.1)\.(weight|bias)", ROWS),
    (_COG_ANY_BLOCK + r"(self_atten\.proj_out|ff\.net\.2)\.weight", COLUMNS),
    (_COG_ANY_BLOCK + r"self_atten\.proj_qkv\.(weight|bias)", QUERIES_KEYS_VALUES),
)
_COG_FIRST = ("patch_embed.", "caption_projection.", "time_embed.", "ofs_embed.", "pos_embed.")
_COG_LAST = ("norm_final.", "norm_out.", "proj_out_linear.", "adaLN_modulation.")


def cogvideox(config: CogVideoXConfig) -> MegatronForm:
    """Describe the rank files of CogVideoX."""
    # Patch convolution and position table have the shapes of the diffusers folder.
    stored = [rule for rule in cogvideox_weights(config).rules if isinstance(rule.op, Reshape)]
    renamed = {"patch_embed.pos_embedding": "pos_embed.pos_embedding"}
    rules = [Rule(rule.native, renamed.get(str(rule.foreign), str(rule.foreign)), rule.op) for rule in stored]
    rules += [Rule(native, foreign) for native, foreign in _COG_PAIRS]
    fused, table = _COG_BLOCK + "self_atten.proj_qkv.{kind}", _COG_BLOCK + "scale_shift_table.1.{kind}"
    for number, kind in enumerate("qkv"):
        rules.append(Rule(f"blocks.{{i}}.attn.qkv.{kind}.{{kind}}", fused, TensorChunk(number, 3)))
    # Rows: shift, scale and gate of both modulations for latents, then the same for text.
    three = 3 * config.hidden_size
    for number, name in enumerate(("attn", "mlp")):
        rules.append(
            Rule(f"blocks.{{i}}.{name}_modulation.{{kind}}", table, GroupedRows(number, 2, rows=(three, three)))
        )
    part = PipelinePart("dit", "videodit_blocks.", _COG_FIRST, _COG_LAST, config.num_layers)
    return MegatronForm(WeightMap(tuple(rules)), COGVIDEOX_SPLITS, (part,), kv_heads=config.num_attention_heads)


_REFINER = "txt_in.individual_token_refiner.blocks.{i}."
_DOUBLE, _SINGLE = "double_blocks.{i}.", "single_blocks.{i}."
_HUNYUAN_PAIRS = (
    ("embed.latents.bias", "img_in.proj.bias"),
    ("embed.text.embed.{kind}", "txt_in.input_embedder.{kind}"),
    ("embed.text.time.up.{kind}", "txt_in.t_embedder.time_embed.0.{kind}"),
    ("embed.text.time.down.{kind}", "txt_in.t_embedder.time_embed.2.{kind}"),
    ("embed.text.pooled.up.{kind}", "txt_in.c_embedder.linear_1.{kind}"),
    ("embed.text.pooled.down.{kind}", "txt_in.c_embedder.linear_2.{kind}"),
    ("embed.text.blocks.{i}.attn_norm.{kind}", _REFINER + "norm1.{kind}"),
    ("embed.text.blocks.{i}.out.{kind}", _REFINER + "self_attn_proj.{kind}"),
    ("embed.text.blocks.{i}.mlp_norm.{kind}", _REFINER + "norm2.{kind}"),
    ("embed.text.blocks.{i}.mlp.up.{kind}", _REFINER + "mlp.fc1.{kind}"),
    ("embed.text.blocks.{i}.mlp.down.{kind}", _REFINER + "mlp.fc2.{kind}"),
    ("embed.text.blocks.{i}.modulation.{kind}", _REFINER + "adaLN_modulation.1.{kind}"),
    ("embed.time.up.{kind}", "time_in.time_embed.0.{kind}"),
    ("embed.time.down.{kind}", "time_in.time_embed.2.{kind}"),
    ("embed.guidance.up.{kind}", "guidance_in.time_embed.0.{kind}"),
    ("embed.guidance.down.{kind}", "guidance_in.time_embed.2.{kind}"),
    ("embed.pooled.up.{kind}", "vector_in.fc1.{kind}"),
    ("embed.pooled.down.{kind}", "vector_in.fc2.{kind}"),
    *(
        (f"blocks.{{i}}.{native.format(ours)}", _DOUBLE + foreign.format(theirs))
        for ours, theirs in (("latent", "img"), ("text", "txt"))
        for native, foreign in (
            ("{}_modulation.{{kind}}", "{}_mod.linear.{{kind}}"),
            ("attn.{}_norm.{{h}}.weight", "{}_attn_{{h}}_norm.weight"),
            ("attn.{}_out.{{kind}}", "{}_attn_proj.{{kind}}"),
            ("{}_mlp.up.{{kind}}", "{}_mlp.fc1.{{kind}}"),
            ("{}_mlp.down.{{kind}}", "{}_mlp.fc2.{{kind}}"),
        )
    ),
    ("single_blocks.{i}.modulation.{kind}", _SINGLE + "modulation.linear.{kind}"),
    ("single_blocks.{i}.norm.{h}.weight", _SINGLE + "{h}_norm.weight"),
    ("single_blocks.{i}.proj.up.{kind}", _SINGLE + "linear1_mlp.{kind}"),
    ("single_blocks.{i}.out.bias", _SINGLE + "linear2.bias"),
    ("head.proj.{kind}", "proj_out.{kind}"),
)
_HUNYUAN_FUSED = (
    ("embed.text.blocks.{i}.qkv.{h}.{kind}", _REFINER + "self_attn_qkv.{kind}"),
    ("blocks.{i}.attn.latent.{h}.{kind}", _DOUBLE + "img_attn_qkv.{kind}"),
    ("blocks.{i}.attn.text.{h}.{kind}", _DOUBLE + "txt_attn_qkv.{kind}"),
    ("single_blocks.{i}.proj.{h}.{kind}", _SINGLE + "linear1_qkv.{kind}"),
)
HUNYUAN_SPLITS = (
    (r"(vector_in\.fc1|proj_out|adaLN_modulation\.1)\.(weight|bias)", ROWS),
    (r"vector_in\.fc2\.weight", COLUMNS),
    (r"double_blocks\.\d+\.(img|txt)_(mod\.linear|mlp\.fc1)\.(weight|bias)", ROWS),
    (r"double_blocks\.\d+\.(img|txt)_(attn_proj|mlp\.fc2)\.weight", COLUMNS),
    (r"double_blocks\.\d+\.(img|txt)_attn_qkv\.(weight|bias)", QUERIES_KEYS_VALUES),
    (r"single_blocks\.\d+\.(modulation\.linear|linear1_mlp)\.(weight|bias)", ROWS),
    (r"single_blocks\.\d+\.linear1_qkv\.(weight|bias)", QUERIES_KEYS_VALUES),
    (r"single_blocks\.\d+\.linear2\.weight", JoinedColumns()),
)
_HUNYUAN_FIRST = ("img_in.", "txt_in.", "time_in.", "vector_in.", "guidance_in.")


def hunyuan_video(config: HunyuanVideoConfig) -> MegatronForm:
    """Describe the rank files of HunyuanVideo."""
    block = config.shape.block
    joined = ColumnsByHead(block.heads, (block.hidden, block.intermediate))
    (patches,) = [rule for rule in hunyuan_original(config).rules if rule.native == "embed.latents.weight"]
    rules = [
        patches,
        Rule("head.modulation.{kind}", "adaLN_modulation.1.{kind}", SwappedHalves()),
        Rule("single_blocks.{i}.out.weight", _SINGLE + "linear2.weight", joined),
        *plain_rules(_HUNYUAN_PAIRS),
    ]
    for native, foreign in _HUNYUAN_FUSED:
        rules += [Rule(native.replace("{h}", h), foreign, TensorChunk(n, 3)) for n, h in enumerate("qkv")]
    parts = (
        PipelinePart("dit", "double_blocks.", _HUNYUAN_FIRST, (), config.num_layers),
        PipelinePart("dit_single", "single_blocks.", (), ("proj_out.", "adaLN_modulation."), config.num_single_layers),
    )
    return MegatronForm(WeightMap(tuple(rules)), HUNYUAN_SPLITS, parts, kv_heads=config.num_attention_heads)
