"""A VAE that no library has: a latent is the mean color of a square of pixels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.diffusion.autoencoders import Autoencoder, VaeForm


class Squares(nn.Module):
    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side
        self.mix = nn.Linear(3, 3, bias=False)


class PainterVae(Autoencoder):
    @classmethod
    def form_of(cls, config: Mapping[str, Any]) -> VaeForm:
        return VaeForm(channels=3, time_stride=1, space_stride=int(config["side"]), std=(0.5,), images_only=True)

    @classmethod
    def build(cls, config: Mapping[str, Any]) -> nn.Module:
        return Squares(int(config["side"]))

    def to_latents(self, pixels: Tensor) -> Tensor:
        means = F.avg_pool3d(pixels, (1, self.form.space_stride, self.form.space_stride))
        return torch.einsum("ij,bjfhw->bifhw", self.vae.mix.weight, means)  # type: ignore[union-attr]

    def to_pixels(self, latents: Tensor) -> Tensor:
        colors = torch.einsum("ij,bjfhw->bifhw", torch.linalg.inv(self.vae.mix.weight), latents)  # type: ignore[union-attr, arg-type]
        return colors.repeat_interleave(self.form.space_stride, 3).repeat_interleave(self.form.space_stride, 4)
