"""Describe how models read conditioning images: as channels beside noisy latents, in place of noisy latents, or not.

A `GenerationFamily` has an instance of one of these classes, for training and sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tessera.diffusion.autoencoders import Autoencoder

# The conditioning frames of a video: frames that the model gets without noise.
Given = Literal["none", "first", "first_last"]
Grid = tuple[int, int, int]  # frames, rows and columns, in tokens or in pixels
Disturb = Callable[[Tensor], Tensor]  # adds noise to the pixels of a conditioning image


def patchify(latents: Tensor, patch: Grid) -> Tensor:
    """Return latents [C, f, h, w] as tokens [n, C x patch]. Values of a token are ordered by channel, frame, row,
    column."""
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
    """Describe how a model reads conditioning images: here not at all, in subclasses in different ways.

    `required`: every sample must have a conditioning image.
    """

    reads_first: ClassVar[bool] = False
    reads_last: ClassVar[bool] = False
    takes_noise: ClassVar[bool] = False  # whether training may add noise to conditioning images or drop them

    required: bool = False

    @property
    def choices(self) -> tuple[Given, ...]:
        """Return the values of `train.task_options.given` that this model supports."""
        last: tuple[Given, ...] = ("first_last",) if self.reads_last else ()
        first: tuple[Given, ...] = ("first", *last) if self.reads_first else ()
        return first if self.required else ("none", *first)

    def replaced_tokens(self, grid: Grid) -> int:
        """Return how many tokens at the beginning of a sample are latents of conditioning frames, without noise."""
        return 0

    def count(self, channels: int, time_stride: int) -> int:
        """Return the number of condition channels beside `channels` latent channels.

        `time_stride`: time stride of the VAE.
        """
        return 0

    def blank_channels(self, channels: int) -> int:
        """Return the number of condition channels, all zero, of a sample without a conditioning image."""
        return 0 if self.required else self.count(channels, 1)

    def channels(
        self, vae: Autoencoder, video: Tensor, shape: Sequence[int], frames: Given, disturb: Disturb | None = None
    ) -> Tensor | None:
        """Return the condition channels [C, f, h, w] of a video; None: the model has none.

        `video`: uint8 [F, H, W, 3]. `shape`: shape of its latents. `frames`: which frames are conditions. `disturb`:
        adds noise to the pixels of the first frame, which are between -1 and 1.
        """
        return None


class ReplacedFrames(GivenImages):
    """Replace the noisy latents of the first frame by its clean latents, at timestep zero."""

    reads_first = True

    def replaced_tokens(self, grid: Grid) -> int:
        frames, rows, columns = grid
        return rows * columns if frames > 1 else 0


class FirstFrameChannels(GivenImages):
    """Add the latents of the first frame as channels; these channels are zero for later frames."""

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
    """Add the latents of the first frame as channels, and a mask of conditioning frames. Without an image, all are
    zero."""

    takes_noise = False

    def count(self, channels: int, time_stride: int) -> int:
        return channels + 1

    def _marked(self, latents: Tensor) -> Tensor:
        return torch.cat([latents, torch.ones_like(latents[:1])])


class MaskedVideoChannels(GivenImages):
    """Add channels to the noisy latents: a mask of the given frames, then the latents of a video.

    The video contains the given frames; all its other frames are grey.
    """

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
        """Return a mask [time_stride, f, h, w], 1 for conditioning frames. A latent frame encodes `time_stride` frames,
        with a channel for each. The first latent frame encodes one frame, so all its channels have the same value."""
        mask = torch.zeros(length + time_stride - 1)
        mask[:time_stride] = 1
        if frames == "first_last":
            mask[-1] = 1
        return mask.view(-1, time_stride).T[:, :, None, None].expand(-1, -1, *size)
