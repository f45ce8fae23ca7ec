"""Declare the options of generation objectives, and draw the random numbers of a sample."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from tessera.config.reader import Section
from tessera.diffusion.given_images import Given
from tessera.diffusion.noise_levels import Objective, TimeOptions
from tessera.runtime.rng import derive, generator

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class VaeOptions(Section):
    """Declare where the VAE lives and how it encodes."""

    residence: Literal["device", "offloaded"] = "device"
    dtype: Literal["float32", "bfloat16"] = "float32"
    tiling: bool = Field(False, description="encode large frames in overlapping tiles")
    slicing: bool = Field(False, description="encode videos of one shape one after another")


class TextEncoderOptions(Section):
    """Declare where text encoders live."""

    residence: Literal["device", "sharded", "offloaded"] = "sharded"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"


class EncoderOptions(Section):
    """Declare the frozen encoders of a run that reads images and videos, not features of them."""

    folder: Path | None = Field(None, description="diffusers folder with vae and text encoders; default: model.path")
    steps: int = Field(
        1, gt=0, le=1000, description="steps whose samples are encoded together: each encoder comes to the device once"
    )
    vae: VaeOptions = Field(default_factory=VaeOptions)
    text: TextEncoderOptions = Field(default_factory=TextEncoderOptions)


class GivenNoise(Section):
    """Declare the noise on given images: its strength is log-normal, so that a model does not copy them."""

    mean: float = Field(-3.0, ge=-100, le=10, description="of the logarithm of its strength, pixels being -1 to 1")
    std: float = Field(0.5, ge=0, le=10)


class DiffusionOptions(TimeOptions):
    """Declare `train.task_options` of `DiffusionTask`."""

    objective: Objective | None = Field(None, description="what the model predicts; default: as the family does")
    caption_dropout: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of samples without their caption, for classifier-free guidance: they get the empty caption, "
        "or zeros where features have none",
    )
    given: Given = Field(
        "none", description="frames of a video that the model is given: none, the first, or the first and the last"
    )
    given_noise: GivenNoise | None = Field(
        None, description="noise on given images before they are encoded, as CogVideoX I2V is trained; {}: as published"
    )
    given_dropout: float = Field(
        0.0, ge=0, le=1, description="share of samples without their given image: its channels are zeros (CogVideoX)"
    )
    guidance: float = Field(1.0, ge=0, le=100, description="guidance scale that a distilled model reads")
    encoders: EncoderOptions | None = Field(
        None,
        description="encode images, videos and captions in every step; default: with the parts of the diffusers folder "
        "that model.path names, unless the data are features",
    )


@dataclass(frozen=True)
class SampleSegment:
    """Hold one segment of the main sequence on the host: all that its random numbers depend on."""

    seed: int  # of its row
    index: int  # in its row
    latents: int  # latent tokens

    def chance(self, purpose: str) -> Random:
        """Return a generator of plain numbers, which stay on the host."""
        return Random(derive(self.seed, purpose, self.index))

    def noise(self, values: int) -> Tensor:
        """Return noise [latents, values]."""
        return torch.randn(self.latents, values, generator=generator("cpu", self.seed, "noise", self.index))
