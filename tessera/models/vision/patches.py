"""Pixels as patches, the way the Qwen-VL families see: resized to whole blocks, cut, and put in block order.

Patches stay bytes until they are on the device: an eight-bit pixel has 256 values, and what they mean is two numbers a
channel. The bytes are those of the reference's Pillow preprocessor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from PIL import Image

from tessera.errors import TesseraError

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
MAX_ASPECT = 200


@dataclass(frozen=True)
class Patches:
    """Define how images of one kind (stills, or frames of videos) are cut into patches."""

    min_pixels: int
    max_pixels: int
    patch: int = 14
    merge: int = 2  # patches along each side of a block that becomes one token
    temporal: int = 2  # frames in one patch
    mean: tuple[float, ...] = CLIP_MEAN
    std: tuple[float, ...] = CLIP_STD
    scale: float = 1 / 255
    whole_clips: bool = False  # the bounds are those of all frames of a video together

    @property
    def width(self) -> int:
        """Return how many numbers one patch has."""
        return len(self.mean) * self.temporal * self.patch**2

    def fit(self, height: int, width: int, frames: int = 1) -> tuple[int, int]:
        """Return the size an image is resized to: whole blocks, within the pixel bounds, nearly the same aspect.

        `frames`: of the video it belongs to, for families whose bounds are those of whole videos.
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
                f"an image of {width}x{height} is too narrow: one side is over {MAX_ASPECT} times the other",
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

        The last temporal patch is filled up with the last frame. Images that have the size of the grid are not resized.
        `order`: numbers of the patches in the order of the result; default: as they are cut.
        """
        t, h, w = grid
        size = (w * self.patch, h * self.patch)
        # A still is one frame shown `temporal` times: its bytes are cut once and copied.
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
        """Return factor and offset [2, width] that turn each byte of a patch into its value.

        A device computes the values faster than a host, and only a fourth of the bytes is sent to it.
        """
        std = np.array(self.std, dtype=np.float64)
        both = np.stack([self.scale / std, -np.array(self.mean, dtype=np.float64) / std])
        return np.repeat(both, self.temporal * self.patch**2, axis=1).astype(np.float32)

    def numbers(self, patches: np.ndarray) -> np.ndarray:
        """Return the values of bytes, rounded as the reference rounds; `affine` differs in the last bit at most."""
        channels = patches.reshape(len(patches), len(self.mean), -1)
        values = [self._table[channel][channels[:, channel]] for channel in range(len(self.mean))]
        return np.stack(values, axis=1).reshape(patches.shape)

    @cached_property
    def _table(self) -> np.ndarray:
        """Return the float32 value of each byte in each channel [3, 256], rounded as the reference rounds."""
        values = (np.arange(256, dtype=np.float64) * self.scale).astype(np.float32)
        mean, std = (np.array(x, dtype=np.float32)[:, None] for x in (self.mean, self.std))
        table: np.ndarray = (values[None] - mean) / std
        return table


def _in_size(frames: Sequence[Image.Image] | np.ndarray, size: tuple[int, int], count: int) -> np.ndarray:
    """Return the frames in `size` as uint8 [count, H, W, 3]; the last one is repeated until there are `count`."""
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
    """Return (row, column) of each patch of a frame, [height * width, 2], in the order of cutting: block by block."""
    rows, columns = np.meshgrid(np.arange(height), np.arange(width), indexing="ij")
    both = np.stack([rows, columns], axis=-1)
    both = both.reshape(height // merge, merge, width // merge, merge, 2).transpose(0, 2, 1, 3, 4)
    return both.reshape(-1, 2)
