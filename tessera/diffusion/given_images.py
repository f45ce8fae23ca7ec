"""Describe how models read given images: as channels beside noisy latents, in place of them, or not at all.

One object of a class here belongs to a family. Training and sampling ask it the same questions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tessera.diffusion.autoencoders import Autoencoder

# Which frames of a video a recipe gives to the model: none, the first, or the first and the last.
Given = Literal["none", "first", "first_last"]
Grid = tuple[int, int, int]  # frames, rows and columns, in tokens or in pixels
Disturb = Callable[[Tensor], Tensor]  # adds noise to the pixels of a given image


def patchify(latents: Tensor, patch: Grid) -> Tensor:
    """Return latents [C, f, h, w] as tokens [n, C x patch], values in the order channel, frame, row, column."""
    channels, *sizes = latents.shape
    pairs = [number for size, side in zip(sizes, patch, strict=True) for number in (size // side, side)]
    return latents.reshape(channels, *pairs).permute(1, 3, 5, 0, 2, 4, 6).flatten(3).flatten(0, 2)


def from_tokens(tokens: Tensor, patch: Grid, grid: Grid) -> Tensor:
    """Return the latents [C, F, H, W] of tokens: the inverse of `patchify`."""
    channels = tokens.shape[1] // (patch[0] * patch[1] * patch[2])
    values = tokens.reshape(*grid, channels, *patch).permute(3, 0, 4, 1, 5, 2, 6)
    return values.reshape(channels, *(count * step for count, step in zip(grid, patch, strict=True)))


@dataclass(frozen=True)
class GivenImages:
    """Describe a model that reads no given images. `required`: whether every sample needs one."""

    reads_first: ClassVar[bool] = False
    reads_last: ClassVar[bool] = False
    takes_noise: ClassVar[bool] = False  # whether noise on given images, and samples without theirs, can be trained

    required: bool = False

    @property
    def choices(self) -> tuple[Given, ...]:
        """Return the values of `train.task_options.given` that this model can be trained with."""
        last: tuple[Given, ...] = ("first_last",) if self.reads_last else ()
        first: tuple[Given, ...] = ("first", *last) if self.reads_first else ()
        return first if self.required else ("none", *first)

    def replaced_tokens(self, grid: Grid) -> int:
        """Return the number of tokens at the beginning of a sample that are given in place of noise."""
        return 0

    def count(self, channels: int, time_stride: int) -> int:
        """Return the number of channels beside the latents, which have `channels`. `time_stride`: of the VAE."""
        return 0

    def blank_channels(self, channels: int) -> int:
        """Return the number of channels, all zero, beside the latents of a sample without an image."""
        return 0 if self.required else self.count(channels, 1)

    def channels(
        self, vae: Autoencoder, video: Tensor, shape: Sequence[int], frames: Given, disturb: Disturb | None = None
    ) -> Tensor | None:
        """Return the channels [C, f, h, w] beside the noisy latents of a video; None: there are none.

        `video`: uint8 [F, H, W, 3]. `shape`: of its latents. `frames`: which of its frames are given. `disturb`: adds
        noise to the first frame, whose pixels are between -1 and 1.
        """
        return None


class ReplacedFrames(GivenImages):
    """Put the latents of the first frame in place of the noisy ones, with a time of zero."""

    reads_first = True

    def replaced_tokens(self, grid: Grid) -> int:
        frames, rows, columns = grid
        return rows * columns if frames > 1 else 0


class FirstFrameChannels(GivenImages):
    """Add the latents of the first frame as channels; later frames have zeros."""

    reads_first = True
    takes_noise = True

    def count(self, channels: int, time_stride: int) -> int:
        return channels

    def channels(
        self, vae: Autoencoder, video: Tensor, shape: Sequence[int], frames: Given, disturb: Disturb | None = None
    ) -> Tensor | None:
        pixels = video[:1].float() / 127.5 - 1
        (latents,) = vae.encode([pixels if disturb is None else disturb(pixels)])
        latents = self._marked(latents)
        channels = latents.new_zeros(latents.shape[0], *shape[1:])
        channels[:, : latents.shape[1]] = latents
        return channels

    def _marked(self, latents: Tensor) -> Tensor:
        return latents


class MarkedFrameChannels(FirstFrameChannels):
    """Add the latents of the first frame as channels, then a mask of latent frames: all zeros without an image."""

    takes_noise = False

    def count(self, channels: int, time_stride: int) -> int:
        return channels + 1

    def _marked(self, latents: Tensor) -> Tensor:
        return torch.cat([latents, torch.ones_like(latents[:1])])


class MaskedVideoChannels(GivenImages):
    """Add a mask of given frames as channels, then the latents of a video that is grey but for the given frames."""

    reads_first = True
    reads_last = True

    def count(self, channels: int, time_stride: int) -> int:
        return channels + time_stride

    def channels(
        self, vae: Autoencoder, video: Tensor, shape: Sequence[int], frames: Given, disturb: Disturb | None = None
    ) -> Tensor | None:
        pixels = video.float() / 127.5 - 1
        grey = torch.zeros_like(pixels)
        grey[0] = pixels[0]
        if frames == "first_last":
            grey[-1] = pixels[-1]
        (latents,) = vae.encode([grey])
        return torch.cat([self._mask(vae.form.time_stride, len(video), shape[2:], frames).to(latents), latents])

    @staticmethod
    def _mask(time_stride: int, length: int, size: Sequence[int], frames: Given) -> Tensor:
        """Return [time_stride, f, h, w] with 1 where a frame is given: a channel for each frame of a latent frame. The
        first latent frame holds one frame, which fills all channels."""
        mask = torch.zeros(length + time_stride - 1)
        mask[:time_stride] = 1
        if frames == "first_last":
            mask[-1] = 1
        return mask.view(-1, time_stride).T[:, :, None, None].expand(-1, -1, *size)
