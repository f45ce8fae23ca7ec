"""Denoise latents: in every step the model predicts with and without the prompt, and a solver updates the latents.

Latents are tokens [tokens, values of a patch]. Solvers work elementwise, so the order of values does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tessera.core.batch import Batch
from tessera.core.outputs import LATENTS
from tessera.diffusion.batches import pack
from tessera.diffusion.encoders import SampleConditions
from tessera.diffusion.family import GenerationFamily
from tessera.diffusion.given_images import Grid
from tessera.diffusion.samples import EncodedMedia
from tessera.diffusion.sampling.over_ranks import PassRanks
from tessera.diffusion.sampling.solver import Solver
from tessera.errors import TesseraError

ALONE = PassRanks()


@dataclass(frozen=True)
class Expert:
    """Hold a model, its guidance scale, and the lowest timestep (1000 is noise) at which it is used."""

    model: Callable[[Batch], Any]
    scale: float
    since: float = 0.0


@dataclass(frozen=True)
class Inputs:
    """Hold the inputs of a forward pass that are equal in all steps: all but noisy latents and timesteps.

    `batch["latents"]` contains tokens of images to edit and of conditioning frames, and zeros at `generated`. If the
    batch has a `time_index`, tokens of conditioning frames use the last timestep, which is zero.
    """

    batch: Batch
    generated: Tensor  # [G] int64: indices of the tokens to generate in `batch["latents"]`
    condition: Tensor | None = None  # [N, values]: condition channels beside the latents


def packed(
    samples: Sequence[SampleConditions], family: GenerationFamily, grid: Grid, scale: float, dtype: torch.dtype
) -> Inputs:
    """Return the inputs of one forward pass. `grid`: size of the latents in tokens. `scale`: guidance
    scale as a model input."""
    latents: list[Tensor] = []
    items, generated, count = [], [], math.prod(grid)
    for sample in samples:
        rows = {"text": sample.text, "image_embeds": sample.image_embeds}
        if sample.pooled is not None:
            rows["pooled"] = sample.pooled.unsqueeze(0)
        tensors = {name: values.to(dtype) for name, values in rows.items() if values is not None}
        embeds, still = len(tensors.get("image_embeds", ())), 0 if sample.first is None else len(sample.first)
        tokens = torch.zeros(count, family.patch_values, dtype=dtype, device=sample.text.device)
        if sample.first is not None:
            tokens[:still] = sample.first.to(dtype)
        images = torch.cat([tokens, *(image.to(dtype) for image, _ in sample.references)])
        first = sum(len(part) for part in latents)
        generated.append(torch.arange(first + still, first + count))
        latents.append(images)
        length = len(images) + (len(sample.text) + embeds if family.joint else 0)
        grids = tuple(size for _, size in sample.references)
        items.append(EncodedMedia("", length, grid, len(sample.text), tensors, grids, embeds=embeds))
    device = samples[0].text.device
    batch = pack(family, items).to(device)
    batch = replace(batch, tensors={name: values for name, values in batch.tensors.items() if name != "trained"})
    batch = batch.with_tensors(latents=torch.cat(latents))
    if family.guidance_input:
        batch = batch.with_tensors(guidance=torch.full((len(samples),), scale, dtype=torch.float32, device=device))
    index = torch.cat(generated).to(device)
    # With per-token timesteps, tokens of conditioning frames get timestep zero here.
    if family.token_times and any(sample.first is not None for sample in samples):
        assert not family.joint, "the main sequence contains only latent tokens"
        noisy = torch.zeros(len(batch["latents"]), dtype=torch.bool, device=device).index_fill(0, index, True)
        batch = batch.with_tensors(time_index=torch.where(noisy, batch["sample_index"], len(samples)))
    channels = [sample.condition.to(dtype) for sample in samples if sample.condition is not None]
    return Inputs(batch, index, torch.cat(channels) if channels else None)


@torch.no_grad()
def denoise(
    experts: Sequence[Expert],
    passes: Sequence[Inputs],
    noise: Sequence[Tensor],
    solvers: Sequence[Solver],
    guide: Callable[[Tensor, Tensor, float], Tensor],
    *,
    dynamic: bool = False,
    ranks: PassRanks = ALONE,
    on_step: Callable[[int, int], None] | None = None,
) -> list[Tensor]:
    """Return the latents of each sample, [tokens, values].

    `experts`: ordered from most to least noise. `passes`: the inputs with the prompt, and for guidance those without
    it. `guide`: combines both predictions by a scale. `dynamic`: see `dynamic_scale`. `ranks`: the ranks that
    share the passes. `on_step`: called with the number of finished steps and of all steps.
    """
    latents = list(noise)
    times = solvers[0].timesteps  # all samples of a batch have the same size and schedule
    for number, time in enumerate(times.tolist()):
        expert = next(expert for expert in experts if time >= expert.since)
        flat = torch.cat(latents)
        predictions = ranks.predict(passes, partial(_predict, expert.model, flat=flat, time=time))
        scale = dynamic_scale(expert.scale, time, len(times)) if dynamic else expert.scale
        guided = predictions[0] if len(predictions) == 1 else guide(predictions[0], predictions[1], scale)
        parts = torch.split(guided, [len(tokens) for tokens in latents])
        latents = [
            solver.step(number, part, tokens) for solver, part, tokens in zip(solvers, parts, latents, strict=True)
        ]
        _check_numbers(latents, number)
        if on_step is not None:
            on_step(number + 1, len(times))
    return latents


def dynamic_scale(scale: float, timestep: float, steps: int) -> float:
    """Return a guidance scale between 1 and 1 + `scale`, by the formula of the published pipeline of CogVideoX.

    The formula compares timesteps (0 to 1000) with the number of steps, so the scale grows steadily only with 1000.
    """
    return 1 + scale * (1 - math.cos(math.pi * ((steps - timestep) / steps) ** 5.0)) / 2


def _predict(model: Callable[[Batch], Any], inputs: Inputs, flat: Tensor, time: float) -> Tensor:
    """Return the predictions for the tokens to generate."""
    batch, index = inputs.batch, inputs.generated
    tokens = batch["latents"].index_copy(0, index, flat.to(batch["latents"].dtype))
    if inputs.condition is not None:
        tokens = torch.cat([tokens, inputs.condition], dim=1)
    samples = batch.segments["latents"].bounds.numel() - 1
    times = torch.full((samples + ("time_index" in batch),), time, dtype=torch.float32, device=flat.device)
    times[samples:] = 0
    return model(batch.with_tensors(latents=tokens, timesteps=times))[LATENTS].index_select(0, index)


def _check_numbers(latents: Sequence[Tensor], number: int) -> None:
    if not all(bool(tokens.isfinite().all()) for tokens in latents):
        raise TesseraError(
            f"the latents are not finite after step {number + 1}",
            fix="use bfloat16 instead of float16; otherwise the weights are damaged, or their training diverged",
            code="generation.latents-not-finite",
        )
