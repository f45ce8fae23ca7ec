"""CogVideoX: how it may be split over devices, and what it costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from tessera.core.batch import Batch
from tessera.core.model_plan import ModelPlan, PipelineUnit, StageActivation, TensorStyle
from tessera.core.spec import FULL, Training
from tessera.diffusion.cogvideox.config import CogVideoXConfig
from tessera.diffusion.cross import BOTH
from tessera.diffusion.joint import JOINT_STREAM, joint_example
from tessera.models.text.costs import Measures
from tessera.nn.stage_carry import CARRY


def plan(config: CogVideoXConfig) -> ModelPlan:
    size, heads = config.hidden_size, config.num_attention_heads
    block = 12 * size**2
    embed = (config.in_channels * config.patch_values + config.text_embed_dim) * size
    return ModelPlan(
        blocks=("blocks.{*}",),
        tensor=_styles(config),
        units=(
            PipelineUnit("embed", embed / block),
            PipelineUnit("blocks.{*}", 1.0, "latents", StageActivation(CARRY, size)),
            PipelineUnit("head", config.out_channels * config.patch_values * size / block),
        ),
        streams={"latents": JOINT_STREAM},
        attention=("blocks.{*}.attn.core",),
        heads={f"blocks.{{*}}.attn.{name}": heads for name in ("qkv", "qkv.{q,k,v}")},
    )


def _styles(config: CogVideoXConfig) -> dict[str, TensorStyle]:
    """Return the tensor-parallel style of every parameter."""
    has_bias = config.patch_bias or config.patch_size_t is not None
    styles: dict[str, TensorStyle] = {
        f"embed.latents.{BOTH if has_bias else 'weight'}": "replicate",
        f"embed.text.{BOTH}": "replicate",
        f"embed.time.{{up,down}}.{BOTH}": "replicate",
        f"blocks.{{*}}.{{attn_modulation,mlp_modulation}}.{BOTH}": "replicate",
        f"blocks.{{*}}.attn.qkv.{{q,k,v}}.{BOTH}": "column",
        f"blocks.{{*}}.attn.{{q_norm,k_norm}}.{BOTH}": "heads",
        "blocks.{*}.attn.out.weight": "row",
        "blocks.{*}.attn.out.bias": "replicate",
        f"blocks.{{*}}.mlp.up.{BOTH}": "column",
        "blocks.{*}.mlp.down.weight": "row",
        "blocks.{*}.mlp.down.bias": "replicate",
        f"head.{{modulation,proj}}.{BOTH}": "replicate",
    }
    if config.norm_elementwise_affine:
        styles[f"blocks.{{*}}.{{attn_norm,mlp_norm}}.{BOTH}"] = "replicate"
        styles[f"head.{{norm,modulated_norm}}.{BOTH}"] = "replicate"
    if config.use_learned_positional_embeddings:
        styles["embed.places.weight"] = "replicate"
    if config.ofs_embed_dim is not None:
        styles[f"embed.offset.{{up,down}}.{BOTH}"] = "replicate"
    return styles


def work(config: CogVideoXConfig, measures: Measures, training: Training) -> np.ndarray:
    """Return the FLOPs of each sample; the offset, one entry for a whole batch, is not counted."""
    blocks, first, last = (training.get(part, FULL) for part in ("blocks", "embed", "head"))
    tokens, text = (measures[name].astype(np.float64) for name in ("tokens", "text"))
    latents, size, time, values = tokens - text, config.hidden_size, config.time_embed_dim, config.patch_values
    total: np.ndarray = (
        blocks.weights * 2 * config.num_layers * 12 * size * (tokens * size + time)
        + blocks.attention * 4 * config.num_layers * size * tokens**2
        # Latents, text and times have no gradient, so their first product is computed once less.
        + first.first * 2 * size * (latents * config.in_channels * values + text * config.text_embed_dim + time)
        + first.weights * 2 * time**2
        + last.weights * 2 * size * (latents * config.out_channels * values + 2 * time)
    )
    return total


def example(config: CogVideoXConfig, tokens: int) -> Batch:
    """Return a batch of one video; of a model with stored positions, of positions that it has."""
    batch = joint_example(config, tokens)
    if not config.use_learned_positional_embeddings:
        return batch
    _, rows, columns = config.grid
    at = torch.arange(tokens) % (rows * columns)
    places = torch.stack([torch.zeros_like(at), at // columns, at % columns])
    return replace(batch, shapes={}).with_tensors(positions=places)  # no shape: a whole video may have more tokens
