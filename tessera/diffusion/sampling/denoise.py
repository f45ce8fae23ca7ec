"""Turn noise into latents: at every step the model predicts, with and without the prompt, and a solver moves on.

Everything happens on tokens, [tokens, values of a patch]: solvers work element by element, and the order in which the
values of a video lie makes no difference to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tessera.core.batch import Batch
from tessera.core.outputs import LATENTS
from tessera.diffusion.sampling.guidance import Guidance
from tessera.diffusion.sampling.over_ranks import PassRanks
from tessera.diffusion.sampling.solver import Solver
from tessera.errors import TesseraError

ALONE = PassRanks()


@dataclass(frozen=True)
class Expert:
    """Hold a model, the guidance scale it is used with, and from which time on (1000 is noise) it is the one to ask."""

    model: Callable[[Batch], Any]
    scale: float
    since: float = 0.0


@dataclass(frozen=True)
class Inputs:
    """Hold what the model reads at every step, packed for one forward pass: all but noisy latents and times.

    `batch["latents"]` has the tokens of given images (references, first frames) and anything elsewhere; `generated` are
    the tokens to be made. Where the batch has a `time_index`, given frames have the time behind those of samples, zero.
    A pass may hold every sample twice, with and without the prompt, one half after the other.
    """

    batch: Batch
    generated: Tensor  # [G] int64, of the tokens in `batch["latents"]`
    condition: Tensor | None = None  # [N, values]: channels beside the latents


@torch.no_grad()
def denoise(
    experts: Sequence[Expert],
    passes: Sequence[Inputs],
    noise: Sequence[Tensor],
    solvers: Sequence[Solver],
    guidance: Guidance,
    ranks: PassRanks = ALONE,
    on_step: Callable[[int, int], None] | None = None,
) -> list[Tensor]:
    """Return the latents of each sample, [tokens, values].

    `experts`: from the one for most noise to the one for least. `passes`: one or two, which together hold every sample
    once (without guidance) or twice. `ranks`: who computes the passes. `on_step(n, steps)` is called after each step.
    """
    latents = list(noise)
    times = solvers[0].timesteps  # samples of one batch have one size, and so one schedule
    for number, time in enumerate(times.tolist()):
        expert = next(one for one in experts if time >= one.since)
        flat = torch.cat(latents)
        found: list[Tensor] = []
        for predicted in ranks.predict(passes, partial(_predict, expert.model, flat=flat, time=time)):
            found += torch.split(predicted, len(flat))
        scale = guidance.scale_at(expert.scale, time, len(times))
        guided = found[0] if len(found) == 1 else guidance.combine(found[0], found[1], scale)
        parts = torch.split(guided, [len(tokens) for tokens in latents])
        latents = [
            solver.step(number, part, tokens) for solver, part, tokens in zip(solvers, parts, latents, strict=True)
        ]
        _check_numbers(latents, number)
        if on_step is not None:
            on_step(number + 1, len(times))
    return latents


def _predict(model: Callable[[Batch], Any], inputs: Inputs, flat: Tensor, time: float) -> Tensor:
    """Return what the model predicts for the generated tokens of a pass."""
    batch, index = inputs.batch, inputs.generated
    noisy = flat.repeat(len(index) // len(flat), 1)
    tokens = batch["latents"].index_copy(0, index, noisy.to(batch["latents"].dtype))
    if inputs.condition is not None:
        tokens = torch.cat([tokens, inputs.condition], dim=1)
    samples = batch.segments["latents"].bounds.numel() - 1
    times = torch.full((samples + ("time_index" in batch),), time, dtype=torch.float32, device=flat.device)
    times[samples:] = 0
    return model(batch.with_tensors(latents=tokens, timesteps=times))[LATENTS].index_select(0, index)  # type: ignore[no-any-return]


def _check_numbers(latents: Sequence[Tensor], number: int) -> None:
    if not all(bool(tokens.isfinite().all()) for tokens in latents):
        raise TesseraError(
            f"the latents are not finite after step {number + 1}",
            fix="the weights are damaged or the training diverged; float16 is too small for some models: try bfloat16",
        )
