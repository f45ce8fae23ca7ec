"""Draw the noise level of a sample, and compute the training target.

A level mixes a clean sample with noise: noisy = clean_share * clean + noise_share * noise. Flow matching interpolates
linearly; DDPM preserves the variance. The schedules are those of diffusers.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from random import Random
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from tessera.config.reader import Section

TIMES = 1000  # the timestep of pure noise in all models
# The prediction of the model: the velocity from data to noise, the noise, or v.
Objective = Literal["flow", "epsilon", "v"]


class ShiftByTokens(Section):
    """Shift timesteps towards noise by the number of latent tokens: large images need more noise."""

    base_shift: float = Field(0.5, ge=-100, le=100, description="shift of a sample with `base_tokens` tokens")
    max_shift: float = Field(1.15, ge=-100, le=100, description="shift of a sample with `max_tokens` tokens")
    base_tokens: int = Field(256, gt=0, le=10**9)
    max_tokens: int = Field(4096, gt=0, le=10**9)
    law: Literal["exponential", "linear"] = Field("exponential", description="exponential: shifts are logarithms")

    @model_validator(mode="after")
    def _two_sizes(self) -> ShiftByTokens:
        if self.base_tokens == self.max_tokens:
            raise ValueError("base_tokens and max_tokens must be different")
        return self

    def shift(self, tokens: int) -> float:
        """Return the shift of timesteps for a sample with `tokens` latent tokens."""
        slope = (self.max_shift - self.base_shift) / (self.max_tokens - self.base_tokens)
        shift = self.base_shift + slope * (tokens - self.base_tokens)
        return math.exp(shift) if self.law == "exponential" else max(shift, 1e-6)


class Betas(Section):
    """Declare the noise that each step of a DDPM schedule adds."""

    schedule: Literal["linear", "scaled_linear"] = "scaled_linear"
    start: float = Field(0.00085, gt=0, lt=1)
    end: float = Field(0.012, gt=0, lt=1)
    snr_shift: float = Field(
        1.0, gt=0, le=1e6, description="divides the signal-to-noise ratio: 3.0 in CogVideoX 2B, 1.0 in CogVideoX 5B"
    )
    zero_snr: bool = Field(False, description="the last step is pure noise")

    def signal_shares(self, steps: int) -> Tensor:
        """Return `alphas_cumprod`, [steps] float64: the share of signal in the variance after each step."""
        power = 0.5 if self.schedule == "scaled_linear" else 1.0
        betas = torch.linspace(self.start**power, self.end**power, steps, dtype=torch.float64) ** (1 / power)
        shares = torch.cumprod(1 - betas, 0)
        shares = shares / (self.snr_shift + (1 - self.snr_shift) * shares)
        if self.zero_snr:
            root = shares.sqrt()
            shares = ((root - root[-1]) * root[0] / (root[0] - root[-1])) ** 2
        return shares


class TimeOptions(Section):
    """Declare how noise levels are drawn and weighted."""

    time: Literal["uniform", "logit_normal", "mode"] = Field(
        "uniform", description="distribution of times before the shift"
    )
    logit_mean: float = Field(0.0, ge=-100, le=100)
    logit_std: float = Field(1.0, gt=0, le=100)
    mode_scale: float = Field(1.29, ge=-1, le=1.75, description="parameter of the distribution `mode`; 0: uniform")
    steps: int | None = Field(
        1000,
        gt=0,
        le=10**6,
        description="number of steps of the schedule from which times are drawn; null: continuous times (flow only)",
    )
    shift: float = Field(1.0, gt=0, le=1000, description="shifts times towards noise (flow only)")
    shift_by_tokens: ShiftByTokens | None = Field(None, description="shift by the size of a sample, instead of `shift`")
    boundaries: tuple[float, float] = Field(
        (0.0, 1.0),
        description="lowest and highest noise level to train on, after the shift: [0.875, 1] and [0, 0.875] for "
        "the two experts of Wan 2.2 T2V, 0.9 for I2V",
    )
    weighting: Literal["none", "sigma_sqrt", "cosmap", "gaussian", "min_snr"] = Field(
        "none",
        description="weight of a sample in the loss: sigma_sqrt, cosmap, gaussian for flow, min_snr for epsilon and v",
    )
    snr_gamma: float = Field(5.0, gt=0, le=1e6, description="maximum signal-to-noise ratio of min_snr")
    betas: Betas = Field(default_factory=Betas, description="the schedule of epsilon and v")

    @model_validator(mode="after")
    def _has_a_range(self) -> TimeOptions:
        low, high = self.boundaries
        if not 0 <= low < high <= 1:
            raise ValueError(f"boundaries must be two increasing numbers from 0 to 1, not [{low}, {high}]")
        return self


@dataclass(frozen=True)
class NoiseLevel:
    """Hold one noise level: its time, the factors of sample and noise in their sum, and its weight in the loss."""

    time: float  # from 0 to 1000
    clean_share: float
    noise_share: float
    weight: float


class NoiseLevels:
    """Draw noise levels according to `TimeOptions`."""

    def __init__(self, options: TimeOptions, objective: Objective) -> None:
        self._options, self._objective = options, objective
        self._signal = [] if objective == "flow" else options.betas.signal_shares(options.steps or TIMES).tolist()

    def draw(self, chance: Random, tokens: int) -> NoiseLevel:
        """Return a random noise level for a sample with `tokens` latent tokens."""
        return self.at(self._position(chance), tokens)

    def at(self, position: float, tokens: int) -> NoiseLevel:
        """Return the noise level at a position of the trained range, from 0 (most noise) to 1 (least noise)."""
        return self._flow(position, tokens) if self._objective == "flow" else self._ddpm(position)

    def _position(self, chance: Random) -> float:
        options = self._options
        if options.time == "logit_normal":
            return 1 / (1 + math.exp(-chance.gauss(options.logit_mean, options.logit_std)))
        u = chance.random()
        if options.time == "mode":
            u = 1 - u - options.mode_scale * (math.cos(math.pi * u / 2) ** 2 - 1 + u)
        return min(max(u, 0.0), 1.0)

    def _flow(self, position: float, tokens: int) -> NoiseLevel:
        options = self._options
        by_tokens = options.shift_by_tokens
        shift = options.shift if by_tokens is None else by_tokens.shift(tokens)
        low, high = (end / (shift - (shift - 1) * end) for end in options.boundaries)
        u = (1 - high) + (high - low) * position
        if options.steps is not None:  # round to a level of the schedule within the boundaries
            first, last = math.ceil((1 - high) * options.steps - 1e-9), math.floor((1 - low) * options.steps + 1e-9)
            u = min(max(int(u * options.steps), first), max(first, min(last, options.steps - 1))) / options.steps
        base = 1 - u
        sigma = shift * base / (1 + (shift - 1) * base)
        weight = 1.0
        if options.weighting == "sigma_sqrt":
            weight = max(sigma, 1e-4) ** -2
        elif options.weighting == "cosmap":
            weight = 2 / (math.pi * (1 - 2 * sigma + 2 * sigma**2))
        elif options.weighting == "gaussian":
            lowest, mean = _gaussian_scale(shift, options.steps or TIMES)
            weight = (_bell(sigma) - lowest) / mean
        return NoiseLevel(sigma * TIMES, 1 - sigma, sigma, weight)

    def _ddpm(self, position: float) -> NoiseLevel:
        options, steps = self._options, len(self._signal)
        low, high = (round(end * steps) for end in options.boundaries)
        number = min(max(high - 1 - int(position * (high - low)), low), high - 1)
        signal = self._signal[number]
        weight = 1.0
        if options.weighting == "min_snr":
            snr = signal / max(1 - signal, 1e-12)
            if self._objective == "v":
                weight = min(snr, options.snr_gamma) / (snr + 1)
            else:
                weight = min(1.0, options.snr_gamma / max(snr, 1e-12))
        return NoiseLevel(number * TIMES / steps, math.sqrt(signal), math.sqrt(1 - signal), weight)


def _bell(sigma: float) -> float:
    return math.exp(-2 * (sigma - 0.5) ** 2)


@functools.lru_cache(maxsize=256)
def _gaussian_scale(shift: float, steps: int) -> tuple[float, float]:
    """Return the minimum of `_bell` over a schedule, and the mean of `_bell` minus the minimum.

    They normalise the loss weights `gaussian`, as in trainers of Wan.
    """
    bases = [1 - number / steps for number in range(steps)]
    heights = [_bell(shift * base / (1 + (shift - 1) * base)) for base in bases]
    lowest = min(heights)
    return lowest, max(sum(heights) / steps - lowest, 1e-12)


def training_target(
    objective: Objective, clean: Tensor, noise: Tensor, clean_share: Tensor, noise_share: Tensor
) -> Tensor:
    """Return the target of the model's prediction: velocity, noise or v."""
    if objective == "flow":
        return noise - clean
    return noise if objective == "epsilon" else clean_share * noise - noise_share * clean
