"""Pixels as CLIP and SigLIP towers read them: square pictures of one size, cut into patches.

Values are those of the reference's Pillow preprocessors bit for bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from PIL import Image

from tessera.data.patches import Patches

# How a picture becomes a square: its middle after it was made as small as the square, or all of it, pulled into shape.
Fit = Literal["crop", "stretch"]


@dataclass(frozen=True)
class Squares:
    size: int  # pixels along a side
    patches: Patches  # of which only the middle of a square matters: whole patches from its upper left corner
    class_row: bool  # an empty row comes before the patches of each square
    fit: Fit = "crop"
    shortest: int = 0  # a picture that is cropped is first given this shorter side
    pad: bool = False  # a picture is first made square by bars of the mean colour

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) before a picture is cropped."""
        if self.fit == "stretch":
            return self.size, self.size
        short, long = min(width, height), max(width, height)
        new_long = int(self.shortest * long / short)
        return (self.shortest, new_long) if width <= height else (new_long, self.shortest)

    def square(self, image: Image.Image) -> np.ndarray:
        """[size, size, 3] of an RGB picture."""
        if self.pad:
            image = self.padded(image)
        pixels = np.asarray(_resize(image, *self.resized(*image.size)))
        above, left = (pixels.shape[0] - self.size) // 2, (pixels.shape[1] - self.size) // 2
        return pixels[above : above + self.size, left : left + self.size]

    def stretched(self, image: Image.Image) -> np.ndarray:
        return np.asarray(_resize(image, self.size, self.size))

    def padded(self, image: Image.Image) -> Image.Image:
        """With bars of the mean colour at two sides, so that it is square."""
        width, height = image.size
        if width == height:
            return image
        side = max(width, height)
        around = Image.new("RGB", (side, side), tuple(int(value * 255) for value in self.patches.mean))
        around.paste(image, ((side - width) // 2, (side - height) // 2))
        return around

    def tiled(self, image: Image.Image, down: int, across: int) -> np.ndarray:
        """[tiles, size, size, 3]: all of it in one, then tile by tile, with black over its edges."""
        high, wide = down * self.size, across * self.size
        width, height = image.size
        if wide / width < high / height:
            new = (wide, min(math.ceil(height * (wide / width)), high))
        else:
            new = (min(math.ceil(width * (high / height)), wide), high)
        canvas = np.zeros((high, wide, 3), dtype=np.uint8)
        above, left = (high - new[1]) // 2, (wide - new[0]) // 2
        canvas[above : above + new[1], left : left + new[0]] = np.asarray(_resize(image, *new))
        cut = canvas.reshape(down, self.size, across, self.size, 3).transpose(0, 2, 1, 3, 4)
        return np.concatenate([self.stretched(image)[None], cut.reshape(-1, self.size, self.size, 3)])

    def cut(self, squares: np.ndarray) -> np.ndarray:
        """[squares, size, size, 3] -> rows of patches, one square after another."""
        side = self.size // self.patches.patch
        seen = side * self.patches.patch
        rows = self.patches.cut(np.ascontiguousarray(squares[:, :seen, :seen]), (len(squares), side, side))
        if not self.class_row:
            return rows
        with_class = np.zeros((len(squares), side * side + 1, rows.shape[1]), dtype=rows.dtype)
        with_class[:, 1:] = rows.reshape(len(squares), side * side, -1)
        return with_class.reshape(-1, rows.shape[1])


def _resize(image: Image.Image, width: int, height: int) -> Image.Image:
    return image if image.size == (width, height) else image.resize((width, height), Image.Resampling.BICUBIC)
