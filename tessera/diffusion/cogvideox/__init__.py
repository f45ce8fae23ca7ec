"""CogVideoX: videos from text, or from text and an image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tessera.core.batch import Batch
from tessera.core.model_plan import ModelPlan, TensorStyle
from tessera.core.spec import FULL, Training
from tessera.diffusion.cogvideox.config import CogVideoXConfig
from tessera.diffusion.cogvideox.model import CogVideoXModel
from tessera.diffusion.joint import JOINT_STREAM, joint_example, joint_family
from tessera.diffusion.plan import BOTH, generation_plan
from tessera.models.text.costs import Measures
from tessera.weights.map import Rule, WeightMap
from tessera.weights.operations import Reshape

_LARGE = {"num_attention_heads": 48, "num_layers": 42, "use_rotary_positional_embeddings": True}
_IMAGE = {"in_channels": 32}
_V15 = {**_LARGE, "patch_size_t": 2, "patch_bias": False, "sample_frames": 81}
_V15 |= {"sample_height": 300, "sample_width": 300}
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "quickstart": {
        "num_attention_heads": 4,
        "attention_head_dim": 32,
        "in_channels": 4,
        "out_channels": 4,
        "time_embed_dim": 64,
        "text_embed_dim": 64,
        "num_layers": 4,
        "use_rotary_positional_embeddings": True,
    },
    "2b": {},
    "5b": _LARGE,
    "5b-i2v": {**_LARGE, **_IMAGE, "use_learned_positional_embeddings": True},
    "1.5-5b": _V15,
    "1.5-5b-i2v": {**_V15, **_IMAGE, "ofs_embed_dim": 512},
}
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
    """Return the parameter names in diffusers folders. There, patches of one frame are embedded by a convolution."""
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


def plan(config: CogVideoXConfig) -> ModelPlan:
    """Return the parallel plan."""
    size, values = config.hidden_size, config.patch_values
    block = 12 * size**2
    units = {
        "embed": (config.in_channels * values + config.text_embed_dim) * size / block,
        "blocks.{*}": 1.0,
        "head": config.out_channels * values * size / block,
    }
    styles: dict[str, TensorStyle] = {
        f"embed.offset.{{up,down}}.{BOTH}": "replicate",
        "embed.places.weight": "replicate",
        f"blocks.{{*}}.attn.{{q_norm,k_norm}}.{BOTH}": "heads",
        f"head.{{norm,modulated_norm}}.{BOTH}": "replicate",
    }
    return generation_plan(JOINT_STREAM, size, config.num_attention_heads, units, styles=styles)


def work(config: CogVideoXConfig, measures: Measures, training: Training) -> np.ndarray:
    """Return the FLOPs of each sample. The embedding of the constant `ofs`, once per batch, is not counted."""
    blocks, first, last = (training.get(part, FULL) for part in ("blocks", "embed", "head"))
    tokens, text = (measures[name].astype(np.float64) for name in ("tokens", "text"))
    latents, size, time, values = tokens - text, config.hidden_size, config.time_embed_dim, config.patch_values
    return (
        blocks.weights * 2 * config.num_layers * 12 * size * (tokens * size + time)
        + blocks.attention * 4 * config.num_layers * size * tokens**2
        # Inputs (latents, text, times) need no gradient, which saves one matrix product in the backward pass.
        + first.first * 2 * size * (latents * config.in_channels * values + text * config.text_embed_dim + time)
        + first.weights * 2 * time**2
        + last.weights * 2 * size * (latents * config.out_channels * values + 2 * time)
    )


def example(config: CogVideoXConfig, tokens: int) -> Batch:
    """Return a batch of one video. For a model with learned positions, all tokens have valid positions."""
    batch = joint_example(config, tokens)
    if not config.use_learned_positional_embeddings:
        return batch
    _, rows, columns = config.grid
    at = torch.arange(tokens) % (rows * columns)
    places = torch.stack([torch.zeros_like(at), at // columns, at % columns])
    # Remove the grid from the batch: a complete video may have more tokens than this example.
    return replace(batch, shapes={}).with_tensors(positions=places)


SPEC = joint_family(
    "cogvideox",
    CogVideoXConfig,
    PRESETS,
    weights,
    build=CogVideoXModel,
    plan=plan,
    work=work,
    example=example,
)
