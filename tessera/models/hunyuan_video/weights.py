"""Parameter names of HunyuanVideo in diffusers folders."""

from __future__ import annotations

from tessera.core.weightmap import Reshape, Rule, WeightMap
from tessera.models.common.joint import CONDITIONS, double_rules, plain_rules, single_rules
from tessera.models.hunyuan_video.config import HunyuanConfig, HunyuanVideoConfig

_BLOCK = ("embed.text.blocks.{i}.", "context_embedder.token_refiner.refiner_blocks.{i}.")
_BLOCK_PAIRS = (
    ("attn_norm.{kind}", "norm1.{kind}"),
    ("qkv.{h}.{kind}", "attn.to_{h}.{kind}"),
    ("out.{kind}", "attn.to_out.0.{kind}"),
    ("mlp_norm.{kind}", "norm2.{kind}"),
    ("mlp.up.{kind}", "ff.net.0.proj.{kind}"),
    ("mlp.down.{kind}", "ff.net.2.{kind}"),
    ("modulation.{kind}", "norm_out.linear.{kind}"),
)
_SHARED = (
    ("embed.latents.bias", "x_embedder.proj.bias"),
    ("embed.text.embed.{kind}", "context_embedder.proj_in.{kind}"),
    ("embed.text.time.up.{kind}", "context_embedder.time_text_embed.timestep_embedder.linear_1.{kind}"),
    ("embed.text.time.down.{kind}", "context_embedder.time_text_embed.timestep_embedder.linear_2.{kind}"),
    ("embed.text.pooled.up.{kind}", "context_embedder.time_text_embed.text_embedder.linear_1.{kind}"),
    ("embed.text.pooled.down.{kind}", "context_embedder.time_text_embed.text_embedder.linear_2.{kind}"),
    ("head.proj.{kind}", "proj_out.{kind}"),
)


def shared_rules(config: HunyuanConfig) -> list[Rule]:
    """Return the rules of what both generations have. Folders embed patches by a convolution."""
    size, channels = config.hidden_size, config.in_channels
    flat = Reshape((size, channels * config.patch_values), (size, channels, *config.patch))
    native, foreign = _BLOCK
    return [
        Rule("embed.latents.weight", "x_embedder.proj.weight", flat),
        *plain_rules(_SHARED),
        *(Rule(native + one, foreign + other) for one, other in _BLOCK_PAIRS),
        *double_rules(),
    ]


def weights(config: HunyuanVideoConfig) -> WeightMap:
    return WeightMap((*shared_rules(config), *plain_rules(CONDITIONS), *single_rules(config.shape)))
