"""Declare the options of generation objectives, and derive the random numbers of a sample."""

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
    """Declare where the VAE is stored and how it encodes."""

    residence: Literal["device", "offloaded"] = "device"
    dtype: Literal["float32", "bfloat16"] = "float32"
    tiling: bool = Field(False, description="encode large frames in overlapping tiles")
    slicing: bool = Field(False, description="encode the videos of a batch one after another")


class TextEncoderOptions(Section):
    """Declare where text encoders are stored."""

    residence: Literal["device", "sharded", "offloaded"] = "sharded"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"


class EncoderOptions(Section):
    """Declare the frozen encoders of a run that trains on images and videos instead of stored features."""

    folder: Path | None = Field(None, description="diffusers folder with vae and text encoders; default: model.path")
    steps: int = Field(
        1, gt=0, le=1000, description="steps whose samples are encoded together: offloaded encoders move less often"
    )
    vae: VaeOptions = Field(default_factory=VaeOptions)
    text: TextEncoderOptions = Field(default_factory=TextEncoderOptions)


class GivenNoise(Section):
    """Declare the log-normal noise on conditioning images, which keeps the model from copying them."""

    mean: float = Field(-3.0, ge=-100, le=10, description="mean of the logarithm of the strength; pixels are -1 to 1")
    std: float = Field(0.5, ge=0, le=10)


class DiffusionOptions(TimeOptions):
    """Declare `train.task_options` of `DiffusionTask`."""

    objective: Objective | None = Field(None, description="the prediction of the model; default: that of the family")
    caption_dropout: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of samples with the empty caption, for classifier-free guidance; features without an empty "
        "caption use zeros",
    )
    given: Given = Field(
        "none", description="frames of a video that are a condition: none, the first, or the first and the last"
    )
    given_noise: GivenNoise | None = Field(
        None, description="noise on given images before encoding, as CogVideoX I2V was trained; {}: published values"
    )
    given_dropout: float = Field(
        0.0, ge=0, le=1, description="share of samples whose given image is replaced by channels of zeros (CogVideoX)"
    )
    guidance: float = Field(1.0, ge=0, le=100, description="guidance scale, an input of guidance-distilled models")
    encoders: EncoderOptions | None = Field(
        None,
        description="encode images, videos and captions in every step; default: with the components of the folder "
        "that model.path names, unless the data are features",
    )


@dataclass(frozen=True)
class SampleSegment:
    """Hold a segment of the main sequence: all that its random numbers depend on."""

    seed: int  # seed of the row
    index: int  # index of the segment in the row
    latents: int  # number of latent tokens

    def chance(self, purpose: str) -> Random:
        """Return the random generator of a sample for one purpose, such as "level"."""
        return Random(derive(self.seed, purpose, self.index))

    def noise(self, values: int) -> Tensor:
        """Return noise [latents, values]."""
        return torch.randn(self.latents, values, generator=generator("cpu", self.seed, "noise", self.index))
