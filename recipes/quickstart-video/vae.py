"""Train a small causal video VAE, diffusers' `AutoencoderKLWan`, to give back the videos that it is shown.

`vae.yaml` names the class and the data here by their import paths: any module that returns its loss can be trained so.
"""

from __future__ import annotations

import math
import random
from typing import Any

import digits
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import (
    WanAttentionBlock,
    WanResidualBlock,
    patchify,
    unpatchify,
)
from torch import Tensor, nn
from torch.utils.data import Dataset


class VideoVae(nn.Module):
    """Wrap the VAE; `forward` returns the loss of giving videos back.

    Frames are not joined: patches of pixels become channels, and causal convolutions see the frames before. So the
    whole video can pass encoder and decoder at once, which gives what `encode` and `decode` compute frame by frame.
    """

    def __init__(
        self, base_dim: int = 32, z_dim: int = 8, patch_size: int = 4, noise: float = 0.1, pull: float = 1e-4
    ) -> None:
        """Make the VAE. `noise`: that is added to latents; `pull`: how strongly latents are drawn to zero."""
        super().__init__()
        self.noise, self.pull = noise, pull
        self.vae = AutoencoderKLWan(
            base_dim=base_dim,
            z_dim=z_dim,
            dim_mult=[1],
            num_res_blocks=1,
            temperal_downsample=[],
            in_channels=3 * patch_size**2,
            out_channels=3 * patch_size**2,
            patch_size=patch_size,
            scale_factor_spatial=patch_size,
            scale_factor_temporal=1,
            latents_mean=[0.0] * z_dim,
            latents_std=[1.0] * z_dim,
        )

    @torch.no_grad()
    def init_weights(self) -> None:
        """Begin as the cosine transform that JPEG makes of blocks of pixels: its lowest frequencies are the latents.

        From there a few hundred steps are enough. Residual branches begin with zero. Norms divide by
        the length of all channels and activations are curved: a constant in every channel makes both almost linear.
        """
        for part in self.vae.modules():
            if isinstance(part, WanResidualBlock):
                _zero(part.conv2)
            elif isinstance(part, WanAttentionBlock):
                _zero(part.proj)
        encoder, decoder, z_dim = self.vae.encoder, self.vae.decoder, self.vae.config.z_dim
        for conv in (encoder.conv_in, encoder.conv_out, decoder.conv_in, decoder.conv_out):
            _zero(conv)
        basis = _cosines(self.vae.config.patch_size)[:z_dim]  # [Z, pixels of a patch]
        constant, small = 3.0, 0.3  # the signal is small beside the constant
        gain = constant / small / _SLOPE
        encoder.conv_in.weight[:z_dim, :, -1, 1, 1] = small * basis.repeat(1, 3) / 3  # grey is the mean of the colours
        decoder.conv_in.weight[:z_dim, :, -1, 1, 1] = small * torch.eye(z_dim)
        encoder.conv_out.weight[:z_dim, :z_dim, -1, 1, 1] = gain * torch.eye(z_dim)
        decoder.conv_out.weight[:, :z_dim, -1, 1, 1] = gain * basis.T.repeat(3, 1)
        for conv in (encoder.conv_in, decoder.conv_in):
            conv.bias.fill_(constant)
        for conv in (encoder.conv_out, decoder.conv_out):
            conv.bias.copy_(-F.silu(torch.ones(())) * conv.weight[:, :, -1, 1, 1].sum(1))
        for conv in (self.vae.quant_conv, self.vae.post_quant_conv):
            _zero(conv)
            conv.weight[:, :, 0, 0, 0] = torch.eye(len(conv.weight))

    def forward(self, video: Tensor) -> dict[str, Any]:
        """Return the mean squared error of videos uint8 [B, F, H, W]."""
        pixels = as_pixels(video)
        latents = self.encoded(pixels)
        # The transformer will not predict latents exactly: the decoder learns to bear small errors.
        noisy = latents + self.noise * torch.randn_like(latents)
        loss = (self.decoded(noisy) - pixels).square().mean() + self.pull * latents.square().mean()
        return {"loss": loss}

    def encoded(self, pixels: Tensor) -> Tensor:
        """Return the mode of the latents, as `encode` of the VAE does."""
        moments = self.vae.quant_conv(self.vae.encoder(patchify(pixels, self.vae.config.patch_size)))
        return moments[:, : self.vae.config.z_dim]

    def decoded(self, latents: Tensor) -> Tensor:
        """Return pixels as `decode` of the VAE does, but not cut to -1 and 1: what is cut has no gradient."""
        patches = self.vae.decoder(self.vae.post_quant_conv(latents))
        return unpatchify(patches, self.vae.config.patch_size)


_SLOPE = 0.928  # of the activation where it begins, at 1


def _zero(conv: nn.Module) -> None:
    for parameter in conv.parameters():
        parameter.zero_()


def _cosines(side: int) -> Tensor:
    """Return the orthonormal cosine transform of blocks, [frequencies, pixels], low frequencies first."""
    at = torch.arange(side)
    line = torch.cos(math.pi * (2 * at + 1) * at.unsqueeze(1) / (2 * side)) * math.sqrt(2 / side)
    line[0] /= math.sqrt(2)
    order = sorted((row + column, row, column) for row in range(side) for column in range(side))
    # In the order in which the VAE makes channels of pixels: column by column.
    return torch.stack([torch.outer(line[column], line[row]).flatten() for _, row, column in order])


def as_pixels(video: Tensor) -> Tensor:
    """Return grey videos uint8 [B, F, H, W] as pixels [B, 3, F, H, W] between -1 and 1."""
    return (video.float() / 127.5 - 1).unsqueeze(1).expand(-1, 3, -1, -1, -1)


class Videos(Dataset[dict[str, Tensor]]):
    """Draw videos of the scans that are trained on: each follows from its number."""

    def __init__(self, count: int = 20_000) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        scans, chance = digits.split(held_out=False), random.Random(number)
        scan = scans.scans[number % len(scans)]
        return {"video": torch.from_numpy(digits.video(scan, chance.choice(digits.WAYS), chance))}
