"""Configuration of the painter, and how it behaves as a generation family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from tessera.diffusion.autoencoders import Autoencoder
from tessera.diffusion.captions import ZeroPaddedCaptions
from tessera.diffusion.config import DiffusersConfig
from tessera.diffusion.family import EvenLevels, GenerationFamily, SamplingDefaults
from tessera.diffusion.given_images import Grid
from tests.toys.painter.vae import PainterVae


class PainterFamily(EvenLevels, GenerationFamily):
    """Read latents of a VAE of its own; draw noise along columns first."""

    @property
    def vaes(self) -> Mapping[str, type[Autoencoder]]:
        return {"PainterVae": PainterVae}

    def draw_noise(self, shape: Grid, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        frames, rows, columns = shape
        return torch.randn(self.channels, frames, columns, rows, generator=generator).transpose(2, 3)


class PainterConfig(DiffusersConfig):
    class_name: ClassVar[str] = "PainterTransformer"

    channels: int = Field(3, gt=0, le=64)
    text_width: int = Field(16, gt=0, le=1024)
    width: int = Field(24, gt=0, le=1024)

    @property
    def patch_values(self) -> int:
        return self.channels * 4

    def generation(self) -> GenerationFamily:
        return PainterFamily(
            channels=self.channels,
            patch=(1, 2, 2),
            captions=(ZeroPaddedCaptions(length=6),),
            sampling=SamplingDefaults(height=16, width=24, steps=2, guidance=1.0),
        )
