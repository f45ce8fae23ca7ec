"""Train a small causal video VAE, diffusers' `AutoencoderKLWan`, to give back the videos that it is shown.

`vae.yaml` names the class and the data here by their import paths: any module that returns its loss can be trained so.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import digits
import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, unpatchify
from torch import Tensor, nn
from torch.utils.data import Dataset


class VideoVae(nn.Module):
    """Wrap the VAE; `forward` returns the loss of giving videos back."""

    def __init__(
        self,
        base_dim: int = 16,
        z_dim: int = 8,
        dim_mult: Sequence[int] = (1, 2),
        in_time: Sequence[bool] = (True,),
        patch_size: int = 2,
        noise: float = 0.1,
        pull: float = 1e-3,
    ) -> None:
        """Make the VAE. Each step of `dim_mult` halves rows and columns, and frames where `in_time` says so;
        `patch_size` joins pixels before. `noise`: in latents; `pull`: how strongly latents are drawn to zero."""
        super().__init__()
        self.noise, self.pull = noise, pull
        self.vae = AutoencoderKLWan(
            base_dim=base_dim,
            z_dim=z_dim,
            dim_mult=list(dim_mult),
            num_res_blocks=1,
            temperal_downsample=list(in_time),
            in_channels=3 * patch_size**2,
            out_channels=3 * patch_size**2,
            patch_size=patch_size if patch_size > 1 else None,
            scale_factor_spatial=patch_size * 2 ** len(in_time),
            scale_factor_temporal=2 ** sum(in_time),
            latents_mean=[0.0] * z_dim,
            latents_std=[1.0] * z_dim,
        )

    def forward(self, video: Tensor) -> dict[str, Any]:
        """Return the mean squared error of videos uint8 [B, F, H, W]."""
        pixels = as_pixels(video)
        latents = self.vae.encode(pixels).latent_dist.mode()
        # The transformer will not predict latents exactly: the decoder learns to bear small errors.
        noisy = latents + self.noise * torch.randn_like(latents)
        loss = (self.decoded(noisy) - pixels).square().mean() + self.pull * latents.square().mean()
        return {"loss": loss}

    def decoded(self, latents: Tensor) -> Tensor:
        """Return pixels as `decode` of the VAE does, but not cut to -1 and 1: what is cut has no gradient."""
        latents = self.vae.post_quant_conv(latents)
        kept: list[Any] = [None] * sum(isinstance(part, WanCausalConv3d) for part in self.vae.decoder.modules())
        frames = [
            self.vae.decoder(frame, feat_cache=kept, feat_idx=[0], first_chunk=number == 0)
            for number, frame in enumerate(latents.split(1, dim=2))
        ]
        return unpatchify(torch.cat(frames, 2), self.vae.config.patch_size or 1)


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
        known, chance = digits.split(held_out=False), random.Random(number)
        scan = known.scans[number % len(known)]
        return {"video": torch.from_numpy(digits.video(scan, chance.choice(digits.WAYS), chance))}
