"""Parameter names of HunyuanVideo in diffusers folders and in original checkpoints, and its costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tessera.core.spec import FULL, Training
from tessera.diffusion.hunyuan_video.config import HunyuanConfig, HunyuanVideoConfig
from tessera.diffusion.joint import CONDITIONS, double_rules, joint_work, original_rules, plain_rules, single_rules
from tessera.models.text.costs import Measures
from tessera.nn.joint_transformer import TIME_FEATURES
from tessera.weights.map import Rule, WeightMap, fused_rules
from tessera.weights.operations import Reshape

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
# (parameter name in Tessera, parameter name in the original checkpoint).
_ORIGINAL = (
    ("embed.latents.bias", "img_in.proj.bias"),
    ("embed.time.up.{kind}", "time_in.mlp.0.{kind}"),
    ("embed.time.down.{kind}", "time_in.mlp.2.{kind}"),
    ("embed.guidance.up.{kind}", "guidance_in.mlp.0.{kind}"),
    ("embed.guidance.down.{kind}", "guidance_in.mlp.2.{kind}"),
    ("embed.pooled.up.{kind}", "vector_in.in_layer.{kind}"),
    ("embed.pooled.down.{kind}", "vector_in.out_layer.{kind}"),
    ("embed.text.embed.{kind}", "txt_in.input_embedder.{kind}"),
    ("embed.text.time.up.{kind}", "txt_in.t_embedder.mlp.0.{kind}"),
    ("embed.text.time.down.{kind}", "txt_in.t_embedder.mlp.2.{kind}"),
    ("embed.text.pooled.up.{kind}", "txt_in.c_embedder.linear_1.{kind}"),
    ("embed.text.pooled.down.{kind}", "txt_in.c_embedder.linear_2.{kind}"),
    ("head.proj.{kind}", "final_layer.linear.{kind}"),
    *(
        (
            f"embed.text.blocks.{{i}}.{native}.{{kind}}",
            f"txt_in.individual_token_refiner.blocks.{{i}}.{foreign}.{{kind}}",
        )
        for native, foreign in (
            ("attn_norm", "norm1"),
            ("out", "self_attn_proj"),
            ("mlp_norm", "norm2"),
            ("mlp.up", "mlp.fc1"),
            ("mlp.down", "mlp.fc2"),
            ("modulation", "adaLN_modulation.1"),
        )
    ),
    *(
        (f"blocks.{{i}}.{native.format(ours)}", f"double_blocks.{{i}}.{theirs}_{foreign}")
        for ours, theirs in (("latent", "img"), ("text", "txt"))
        for native, foreign in (
            ("{}_modulation.{{kind}}", "mod.linear.{kind}"),
            ("{}_mlp.up.{{kind}}", "mlp.fc1.{kind}"),
            ("{}_mlp.down.{{kind}}", "mlp.fc2.{kind}"),
            ("attn.{}_out.{{kind}}", "attn_proj.{kind}"),
            ("attn.{}_norm.{{h}}.weight", "attn_{h}_norm.weight"),
        )
    ),
    ("single_blocks.{i}.modulation.{kind}", "single_blocks.{i}.modulation.linear.{kind}"),
    ("single_blocks.{i}.norm.{h}.weight", "single_blocks.{i}.{h}_norm.weight"),
    ("single_blocks.{i}.out.bias", "single_blocks.{i}.linear2.bias"),
)


def shared_rules(config: HunyuanConfig) -> list[Rule]:
    """Return the rules that HunyuanVideo and HunyuanVideo 1.5 share. In files, patches are embedded by a
    convolution."""
    native, foreign = _BLOCK
    return [
        _patches(config, "x_embedder.proj.weight"),
        *plain_rules(_SHARED),
        *(Rule(native + name, foreign + other) for name, other in _BLOCK_PAIRS),
        *double_rules(),
    ]


def weights(config: HunyuanVideoConfig) -> WeightMap:
    return WeightMap((*shared_rules(config), *plain_rules(CONDITIONS), *single_rules(config.shape)))


def original(config: HunyuanVideoConfig) -> WeightMap:
    """Return the parameter names and shapes in original checkpoints, where queries, keys and values are one layer."""
    refiner = "txt_in.individual_token_refiner.blocks.{i}.self_attn_qkv"
    rules = (
        _patches(config, "img_in.proj.weight"),
        *plain_rules(_ORIGINAL),
        *fused_rules("embed.text.blocks.{i}.qkv", "qkv", refiner),
        *original_rules(config.shape, "attn_qkv"),
    )
    return WeightMap(rules, mark="img_in.proj.weight")


def _patches(config: HunyuanConfig, foreign: str) -> Rule:
    size, channels = config.hidden_size, config.in_channels
    flat = Reshape((size, channels * config.patch_values), (size, channels, *config.patch))
    return Rule("embed.latents.weight", foreign, flat)


def work(config: HunyuanConfig, measures: Measures, training: Training) -> np.ndarray:
    """Return the FLOPs of each sample, including the text refiner."""
    passes, size, width = training.get("embed", FULL), config.hidden_size, config.text_embed_dim
    text, layers = measures.get("refined", measures["text"]).astype(np.float64), config.num_refiner_layers
    refiner: np.ndarray = (
        passes.first * 2 * size * (text * width + TIME_FEATURES + width)
        + passes.weights * 2 * size**2 * (layers * (12 * text + 2) + 2)
        + passes.attention * 4 * size * layers * text**2
    )
    return joint_work(replace(config.shape, text_width=0), measures, training) + refiner
