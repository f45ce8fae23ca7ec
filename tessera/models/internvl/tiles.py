"""A picture as tiles of one size: how many, which pixels, in which order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from PIL import Image

from tessera.data.patches import Patches, block_positions

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Tiles:
    """Between `least` and `most` tiles of `size` x `size` pixels, and one of the whole picture if they are several.

    A tile is its patches block by block, so that what becomes one token lies together; before them is a row of zeros,
    the place of the class token.
    """

    size: int
    patch: int
    merge: int
    least: int = 1
    most: int = 12
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    scale: float = 1 / 255

    @property
    def side(self) -> int:
        return self.size // self.patch

    @property
    def rows(self) -> int:
        """Of one tile, with that of the class token."""
        return self.side**2 + 1

    @property
    def tokens(self) -> int:
        return (self.side // self.merge) ** 2

    def fit(self, height: int, width: int) -> tuple[int, int]:
        """(columns, rows) of tiles, of nearly the picture's aspect. Of arrangements that are as near, the largest wins
        that the picture fills by half."""
        if self.most == 1:
            return 1, 1
        aspect, area = width / height, width * height
        nearest, best = float("inf"), (1, 1)
        for columns, rows in self._arrangements:
            apart = abs(aspect - columns / rows)
            if apart < nearest or (apart == nearest and area > 0.5 * self.size**2 * columns * rows):
                nearest, best = apart, (columns, rows)
        return best

    def count(self, height: int, width: int) -> int:
        columns, rows = self.fit(height, width)
        return columns * rows + (columns * rows > 1)

    def cut(self, picture: Image.Image, columns: int, rows: int) -> np.ndarray:
        """[tiles x rows of one, values] float32: tiles from left to right and down, the whole picture last."""
        size = self.size
        canvas = _resized(picture, (columns * size, rows * size))
        tiles = canvas.reshape(rows, size, columns, size, 3).swapaxes(1, 2).reshape(-1, size, size, 3)
        if len(tiles) > 1:
            tiles = np.concatenate([tiles, _resized(picture, (size, size))[None]])
        return self._patches_of(tiles)

    def frames(self, clip: np.ndarray) -> np.ndarray:
        """The same of a clip [F, H, W, 3]: one tile for each frame."""
        shape = (len(clip), self.size, self.size, 3)
        if clip.shape != shape:
            clip = np.stack([_resized(Image.fromarray(frame), (self.size, self.size)) for frame in clip])
        return self._patches_of(clip)

    @cached_property
    def index(self) -> np.ndarray:
        """Of each row of a tile, the entry in the table of positions."""
        places = block_positions(self.side, self.side, self.merge)
        return np.concatenate([[0], 1 + places[:, 0] * self.side + places[:, 1]])

    def kept(self, tiles: int) -> np.ndarray:
        """Rows that become tokens: all but those of class tokens."""
        rows = np.arange(tiles * self.rows)
        return rows[rows % self.rows > 0]

    def _patches_of(self, tiles: np.ndarray) -> np.ndarray:
        cut = self.patches.cut(np.ascontiguousarray(tiles), (len(tiles), self.side, self.side))
        found = np.zeros((len(tiles), self.rows, self.patches.width), dtype=np.uint8)
        found[:, 1:] = cut.reshape(len(tiles), -1, self.patches.width)
        return found.reshape(-1, self.patches.width)

    @cached_property
    def _arrangements(self) -> Sequence[tuple[int, int]]:
        """Fewer tiles first; of as many, narrow ones first."""
        sides = range(1, self.most + 1)
        found = [(columns, rows) for columns in sides for rows in sides if self.least <= columns * rows <= self.most]
        return sorted(found, key=lambda one: one[0] * one[1])

    @cached_property
    def patches(self) -> Patches:
        return Patches(1, self.size**2, self.patch, self.merge, 1, self.mean, self.std, self.scale)

    def __getstate__(self) -> dict[str, Any]:
        """Without tables: they are made again faster than they travel to a worker."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def _resized(picture: Image.Image, size: tuple[int, int]) -> np.ndarray:
    return np.asarray(picture if picture.size == size else picture.resize(size, Image.Resampling.BICUBIC))
