"""LTX-Video: videos from highly compressed latents, with or without conditioning frames."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tessera.core.model_plan import ModelPlan
from tessera.diffusion.cross import cross_family, cross_plan
from tessera.diffusion.ltx_video.config import LTXVideoConfig
from tessera.diffusion.ltx_video.model import LTXVideoModel
from tessera.diffusion.plan import BOTH
from tessera.weights.map import Rule, WeightMap

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "quickstart": {
        "num_attention_heads": 4,
        "attention_head_dim": 32,
        "cross_attention_dim": 128,
        "in_channels": 4,
        "out_channels": 4,
        "caption_channels": 64,
        "num_layers": 4,
    },
    "2b": {},
    "13b": {"num_layers": 48, "attention_head_dim": 128, "cross_attention_dim": 4096, "coordinates": "frames"},
}
_PAIRS = (
    ("embed.patch.{kind}", "proj_in.{kind}"),
    ("embed.time.up.{kind}", "time_embed.emb.timestep_embedder.linear_1.{kind}"),
    ("embed.time.down.{kind}", "time_embed.emb.timestep_embedder.linear_2.{kind}"),
    ("embed.modulation.{kind}", "time_embed.linear.{kind}"),
    ("embed.text.up.{kind}", "caption_projection.linear_1.{kind}"),
    ("embed.text.down.{kind}", "caption_projection.linear_2.{kind}"),
    ("blocks.{i}.modulation.table", "transformer_blocks.{i}.scale_shift_table"),
    ("blocks.{i}.attn.qkv.{x}.{kind}", "transformer_blocks.{i}.attn1.to_{x}.{kind}"),
    ("blocks.{i}.attn.{x}_norm.weight", "transformer_blocks.{i}.attn1.norm_{x}.weight"),
    ("blocks.{i}.attn.out.{kind}", "transformer_blocks.{i}.attn1.to_out.0.{kind}"),
    ("blocks.{i}.cross.q.{kind}", "transformer_blocks.{i}.attn2.to_q.{kind}"),
    ("blocks.{i}.cross.kv.{x}.{kind}", "transformer_blocks.{i}.attn2.to_{x}.{kind}"),
    ("blocks.{i}.cross.{x}_norm.weight", "transformer_blocks.{i}.attn2.norm_{x}.weight"),
    ("blocks.{i}.cross.out.{kind}", "transformer_blocks.{i}.attn2.to_out.0.{kind}"),
    ("blocks.{i}.mlp.up.{kind}", "transformer_blocks.{i}.ff.net.0.proj.{kind}"),
    ("blocks.{i}.mlp.down.{kind}", "transformer_blocks.{i}.ff.net.2.{kind}"),
    ("head.modulation.table", "scale_shift_table"),
    ("head.proj.{kind}", "proj_out.{kind}"),
)
# Replacements that turn names of diffusers folders into those of the original checkpoint.
_ORIGINAL = (("proj_in.", "patchify_proj."), ("time_embed.", "adaln_single."), (".norm_{x}.", ".{x}_norm."))


def weights(config: LTXVideoConfig) -> WeightMap:
    return WeightMap(tuple(Rule(native, foreign) for native, foreign in _PAIRS))


def original(config: LTXVideoConfig) -> WeightMap:
    return WeightMap(tuple(Rule(native, _theirs(foreign)) for native, foreign in _PAIRS), mark="patchify_proj.weight")


def _theirs(name: str) -> str:
    for published, original_name in _ORIGINAL:
        name = name.replace(published, original_name)
    return name


def plan(config: LTXVideoConfig) -> ModelPlan:
    """Return the parallel plan. Each head has its own rotary angles, so tensor parallelism does not split
    self-attention."""
    shape, attention = config.shape, ("qkv.{q,k,v}." + BOTH, "{q_norm,k_norm}." + BOTH, "out.weight")
    return cross_plan(
        shape,
        embed=(shape.latent_values + shape.text_width + shape.width) * shape.width,
        styles={f"blocks.{{*}}.attn.{name}": "replicate" for name in attention},
        without_heads=("attn.qkv", "attn.qkv.{q,k,v}"),
    )


SPEC = cross_family(
    "ltx_video", LTXVideoConfig, PRESETS, build=LTXVideoModel, plan=plan, weights=weights, original=original
)
