"""Patches of images and frames: images are resized to whole blocks of patches, and patches are in block order.

Patches stay bytes until they are on the device, which normalises them. The bytes are those of transformers' Pillow
preprocessor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from PIL import Image

from tessera.errors import TesseraError

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
MAX_ASPECT = 200
# Returns indices and weights of learned position embeddings for patches at `positions` [P, 2] (row, column). Further
# arguments: height and width of the image in patches, and the number of rows and of columns of the embedding table.
PositionTable = Callable[[np.ndarray, int, int, int], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Patches:
    """Define how images, or frames of videos, are resized and cut into patches."""

    min_pixels: int
    max_pixels: int
    patch: int = 14
    merge: int = 2  # number of patches along each side of a block, which becomes one token
    temporal: int = 2  # number of frames in a patch
    mean: tuple[float, ...] = CLIP_MEAN
    std: tuple[float, ...] = CLIP_STD
    scale: float = 1 / 255
    whole_clips: bool = False  # pixel bounds apply to all frames of a video together

    @property
    def width(self) -> int:
        """Return the number of values in a flattened patch."""
        return len(self.mean) * self.temporal * self.patch**2

    def fit(self, height: int, width: int, frames: int = 1) -> tuple[int, int]:
        """Return the height and width to which an image is resized: whole blocks, within the pixel bounds.

        `frames`: number of frames of the video. It is used only if `whole_clips` is true.
        """
        side, counted = self.patch * self.merge, 1
        frames = max(frames, self.temporal) if self.whole_clips else 1
        if self.whole_clips:
            counted = round(frames / self.temporal) * self.temporal
            if min(height, width) < side:
                grow = max(side / height, side / width)
                height, width = int(height * grow), int(width * grow)
        if max(height, width) > MAX_ASPECT * min(height, width):
            raise TesseraError(
                f"an image of {width}x{height} is too narrow: one side is more than {MAX_ASPECT} times the other",
                fix="crop the image",
                code="media.image-too-narrow",
            )
        fit_h, fit_w = round(height / side) * side, round(width / side) * side
        if counted * fit_h * fit_w > self.max_pixels:
            shrink = math.sqrt(frames * height * width / self.max_pixels)
            fit_h = max(side, math.floor(height / shrink / side) * side)
            fit_w = max(side, math.floor(width / shrink / side) * side)
        elif counted * fit_h * fit_w < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (frames * height * width))
            fit_h = math.ceil(height * grow / side) * side
            fit_w = math.ceil(width * grow / side) * side
        return fit_h, fit_w

    def grid(self, height: int, width: int, frames: int = 1) -> tuple[int, int, int]:
        """Return the number of patches along time, height and width."""
        fit_h, fit_w = self.fit(height, width, frames)
        return -(-frames // self.temporal), fit_h // self.patch, fit_w // self.patch

    def tokens(self, grid: Sequence[int]) -> int:
        return math.prod(grid) // self.merge**2

    def cut(
        self, frames: Sequence[Image.Image] | np.ndarray, grid: Sequence[int], order: np.ndarray | None = None
    ) -> np.ndarray:
        """Cut RGB images of one size, or frames [F, H, W, 3], into patches [P, width] of bytes.

        If frames do not fill the last temporal patch, the last frame is repeated. Images are resized to the size of the
        grid. `order`: index of the patch at each place of the result; by default, the patches of a block of merge x
        merge follow each other.
        """
        t, h, w = grid
        size = (w * self.patch, h * self.patch)
        # An image is one frame repeated `temporal` times, so its bytes are cut once and copied.
        distinct = 1 if len(frames) == 1 else self.temporal
        pixels = _in_size(frames, size, t * distinct)
        m, p = self.merge, self.patch
        blocks = pixels.reshape(t, distinct, h // m, m, p, w // m, m, p, 3)
        blocks = blocks.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(t * h * w, 3, distinct, p * p)
        blocks = blocks if order is None else blocks[order]
        if distinct < self.temporal:
            blocks = np.repeat(blocks, self.temporal, axis=2)
        return blocks.reshape(t * h * w, self.width)

    @property
    def affine(self) -> np.ndarray:
        """Return factor and offset [2, width] that turn a patch's bytes into normalised values.

        The device applies them: it is faster than the host, and copying bytes takes a quarter of the time of floats.
        """
        std = np.array(self.std, dtype=np.float64)
        both = np.stack([self.scale / std, -np.array(self.mean, dtype=np.float64) / std])
        return np.repeat(both, self.temporal * self.patch**2, axis=1).astype(np.float32)

    def numbers(self, patches: np.ndarray) -> np.ndarray:
        """Return the normalised values of bytes, rounded as in transformers; `affine` differs in the last bit at
        most."""
        channels = patches.reshape(len(patches), len(self.mean), -1)
        values = [self._table[channel][channels[:, channel]] for channel in range(len(self.mean))]
        return np.stack(values, axis=1).reshape(patches.shape)

    @cached_property
    def _table(self) -> np.ndarray:
        """Return the normalised float32 value of each byte in each channel [3, 256], rounded as in transformers."""
        values = (np.arange(256, dtype=np.float64) * self.scale).astype(np.float32)
        mean, std = (np.array(x, dtype=np.float32)[:, None] for x in (self.mean, self.std))
        table: np.ndarray = (values[None] - mean) / std
        return table


def _in_size(frames: Sequence[Image.Image] | np.ndarray, size: tuple[int, int], count: int) -> np.ndarray:
    """Return the frames resized to `size`, uint8 [count, H, W, 3]. The last frame is repeated to reach `count`."""
    if isinstance(frames, np.ndarray):
        if frames.shape[2:0:-1] == size and len(frames) == count:
            return np.ascontiguousarray(frames)
        frames = [Image.fromarray(frame) for frame in frames]
    if len(frames) == count == 1 and frames[0].size == size:
        return np.asarray(frames[0])[None]
    pixels = np.empty((count, size[1], size[0], 3), dtype=np.uint8)
    for number, frame in enumerate(frames):
        pixels[number] = np.asarray(frame if frame.size == size else frame.resize(size, Image.Resampling.BICUBIC))
    pixels[len(frames) :] = pixels[len(frames) - 1]
    return pixels


def block_positions(height: int, width: int, merge: int) -> np.ndarray:
    """Return row and column of each patch of a frame, [height * width, 2], block by block."""
    rows, columns = np.meshgrid(np.arange(height), np.arange(width), indexing="ij")
    both = np.stack([rows, columns], axis=-1)
    both = both.reshape(height // merge, merge, width // merge, merge, 2).transpose(0, 2, 1, 3, 4)
    return both.reshape(-1, 2)
