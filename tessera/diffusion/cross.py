"""Main sequence, plan, costs and example batches of families whose latents attend to the text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tessera.core.batch import Batch, Segments
from tessera.core.model_plan import ModelPlan, PipelineUnit, StageActivation, Stream, TensorStyle
from tessera.core.spec import FULL, Training
from tessera.diffusion.config import DiffusersConfig
from tessera.diffusion.family import GenerationSpec
from tessera.diffusion.spec import generation_family
from tessera.models.text.costs import Measures
from tessera.nn.stage_carry import CARRY

BOTH = "{weight,bias}"
EXAMPLE_TEXT = 512
# The main sequence. The task makes latents on the device, from whole samples; the index has those of a rank.
LATENTS = Stream(
    tensors=("sample_index", "positions", "time_index"),
    segments="latents",
    dim=-1,
    positions=("trained",),
    index="token_index",
    own_segments="latents.own",
)
# Tensor-parallel styles of parameters that all these families have.
STYLES: Mapping[str, TensorStyle] = {
    f"embed.{{patch,modulation}}.{BOTH}": "replicate",
    f"embed.{{time,text}}.{{up,down}}.{BOTH}": "replicate",
    "blocks.{*}.modulation.table": "replicate",
    f"blocks.{{*}}.cross.q.{BOTH}": "column",
    f"blocks.{{*}}.cross.kv.{{k,v}}.{BOTH}": "column",
    "blocks.{*}.cross.{q_norm,k_norm}.weight": "features",
    "blocks.{*}.cross.out.weight": "row",
    "blocks.{*}.cross.out.bias": "replicate",
    f"blocks.{{*}}.mlp.up.{BOTH}": "column",
    "blocks.{*}.mlp.down.weight": "row",
    "blocks.{*}.mlp.down.bias": "replicate",
    "head.modulation.table": "replicate",
    f"head.proj.{BOTH}": "replicate",
}


@dataclass(frozen=True)
class CrossShape:
    """Hold the sizes of a transformer with cross attention, from which its costs follow."""

    width: int  # heads x head size
    layers: int
    block: int  # weights of one block by which a token is multiplied
    latent_values: int  # of an input token
    out_values: int
    text_width: int
    time_features: int
    image_width: int = 0  # of image embeddings; 0: none are read
    image_embeds: int = 0  # of a sample


class CrossConfig(DiffusersConfig):
    """Base of configurations of families with cross attention."""

    @property
    def shape(self) -> CrossShape:
        """Return the sizes of the transformer."""
        raise NotImplementedError


def cross_family(
    name: str, config: type[CrossConfig], presets: Mapping[str, Mapping[str, Any]], **parts: Any
) -> GenerationSpec:
    """Return the specification of a family. `parts`: `build`, `plan`, `weights` and more of `generation_family`."""
    return generation_family(name, config, presets, work=_work, measures=batch_measures, example=_example, **parts)


def cross_plan(
    shape: CrossShape,
    styles: Mapping[str, TensorStyle],
    heads: Mapping[str, int],
    embed: float,
    **more: Any,
) -> ModelPlan:
    """Return the parallel plan. `styles`: beside `STYLES`. `embed`: the cost of embeddings in weights. `more`: further
    fields of `ModelPlan`."""
    return ModelPlan(
        blocks=("blocks.{*}",),
        tensor={**STYLES, **styles},
        units=(
            PipelineUnit("embed", embed / shape.block),
            PipelineUnit("blocks.{*}", 1.0, "latents", StageActivation(CARRY, shape.width)),
            PipelineUnit("head", shape.out_values * shape.width / shape.block),
        ),
        streams={"latents": LATENTS},
        attention=("blocks.{*}.attn.core",),
        heads={f"blocks.{{*}}.{name}": count for name, count in heads.items()},
        **more,
    )


def latent_segments(batch: Batch) -> Segments:
    """Return the bounds of the samples among the tokens that a rank has."""
    return batch.segments.get(LATENTS.own_segments, batch.segments[LATENTS.segments])


def batch_measures(batch: Batch) -> dict[str, np.ndarray]:
    """Return the measures of each sample of a batch on the host."""
    names = {"tokens": "latents", "text": "text", "image_embeds": "image_embeds"}
    measures = {n: np.array(batch.segments[of].lengths) for n, of in names.items() if of in batch.segments}
    count = len(measures["tokens"])
    times = batch["timesteps"].shape[0] if "timesteps" in batch else count
    return measures | {"samples": np.full(count, times / count)}


def _work(config: CrossConfig, measures: Measures, training: Training) -> np.ndarray:
    """Return the FLOPs of one forward and backward pass for each sample."""
    shape = config.shape
    passes, first, last = (training.get(part, FULL) for part in ("blocks", "embed", "head"))
    tokens, text, times = (measures[name].astype(np.float64) for name in ("tokens", "text", "samples"))
    images = measures.get("image_embeds", np.full_like(text, shape.image_embeds))
    width, square, read = shape.width, shape.width**2, text + images
    inputs = tokens * shape.latent_values + text * shape.text_width + times * shape.time_features
    image = shape.image_width * (shape.image_width + width)
    total: np.ndarray = (
        passes.weights * 2 * shape.layers * (tokens * shape.block + read * 2 * square)
        + passes.attention * 4 * shape.layers * width * tokens * (tokens + read)
        + first.first * 2 * width * inputs
        + first.weights * 2 * (text * square + times * 7 * square + images * image)
        + last.weights * 2 * tokens * shape.out_values * width
    )
    return total


def _example(config: CrossConfig, tokens: int) -> Batch:
    """Return a batch of one sample with `tokens` latent tokens, all zero."""
    shape = config.shape
    index = torch.zeros(tokens, dtype=torch.int64)
    tensors: dict[str, Tensor] = {
        "sample_index": index,
        "positions": torch.stack([index, index, torch.arange(tokens)]),
        "latents": torch.zeros(tokens, shape.latent_values),
        "text": torch.zeros(EXAMPLE_TEXT, shape.text_width),
        "timesteps": torch.zeros(1),
    }
    segments = {"latents": Segments.of([tokens]), "text": Segments.of([EXAMPLE_TEXT])}
    if shape.image_embeds:
        tensors["image_embeds"] = torch.zeros(shape.image_embeds, shape.image_width)
        segments["image_embeds"] = Segments.of([shape.image_embeds])
    return Batch(tensors, segments, sample_ids=("example",), seeds=(0,), shapes={"latents": ((1, 1, tokens),)})
