"""Which features of a picture or clip become which tokens: numbers that follow from its size alone.

A single picture is seen whole in one tile and cut up in several more. The features of those are put together again to
one grid, without what lies over the picture's edges; a grid that would be too large is made smaller, and an end of line
comes behind each of its rows. Of several pictures each is one tile; frames of clips are tiles of half as many rows and
columns. An end of line is -1 here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

NEWLINE = -1
_MUCH_LARGER = 1.1  # a grid that is larger by less is left as it is


@dataclass(frozen=True)
class Made:
    """Of each token the features it lies between [tokens, K], and their shares; None: K is one."""

    index: np.ndarray
    weights: np.ndarray | None = None


@dataclass(frozen=True)
class Tiles:
    side: int  # features along a side of a tile
    size: int  # pixels along it
    pinpoints: tuple[tuple[int, int], ...]  # resolutions to choose from, height and width
    most: int  # tiles' worth of tokens

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Tiles down and across, for a picture of this size: as much of it as can be seen, with the least waste."""
        best, best_rank = self.pinpoints[0], (0, -math.inf)
        for high, wide in self.pinpoints:
            scale = min(wide / width, high / height)
            seen = min(int(width * scale) * int(height * scale), width * height)
            rank = (seen, seen - high * wide)
            if rank > best_rank:
                best, best_rank = (high, wide), rank
        return best[0] // self.size, best[1] // self.size

    def one(self) -> Made:
        """A picture among others."""
        return Made(np.append(np.arange(self.side**2), NEWLINE)[:, None])

    def single(self, height: int, width: int) -> Made:
        """A picture of this size alone."""
        down, across = self.grid(height, width)
        rows, columns = self._unpadded(height, width, down * self.side, across * self.side)
        lines, weights = self._features(rows, columns, across)[..., None], None
        ratio = math.sqrt(len(rows) * len(columns) / (self.most * self.side**2))
        if ratio > _MUCH_LARGER:
            lines, weights = _smaller(lines[..., 0], int(len(rows) // ratio), int(len(columns) // ratio))
        ends = np.full((len(lines), 1, lines.shape[-1]), NEWLINE)
        index = np.concatenate([lines, ends], axis=1).reshape(-1, lines.shape[-1])
        whole = np.zeros((self.side**2, lines.shape[-1]), dtype=index.dtype)
        whole[:, 0] = np.arange(self.side**2)
        if weights is None:
            return Made(np.concatenate([whole, index]))
        alone = np.eye(1, weights.shape[-1], dtype=np.float32)
        shares = np.concatenate([weights, np.broadcast_to(alone, (len(weights), *alone.shape))], axis=1)
        shares = np.concatenate([np.repeat(alone, len(whole), axis=0), shares.reshape(-1, alone.shape[1])])
        return Made(np.concatenate([whole, index]), shares)

    def clip(self, frames: int) -> Made:
        half = math.ceil(self.side / 2)
        index, weights = _smaller(np.arange(self.side**2).reshape(self.side, self.side), half, half)
        width = index.shape[-1]
        moved = index.reshape(1, -1, width) + (np.arange(frames) * self.side**2)[:, None, None]
        ending = np.full((1, width), NEWLINE)
        shares = np.concatenate([np.tile(weights.reshape(-1, width), (frames, 1)), np.eye(1, width, dtype=np.float32)])
        return Made(np.concatenate([moved.reshape(-1, width), ending]), shares)

    def _unpadded(self, height: int, width: int, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows and columns of features that show the picture, which lies in the middle of its tiles."""
        above = left = 0
        if width / height > columns / rows:
            above = (rows - int(round(height * (columns / width), 7))) // 2
        else:
            left = (columns - int(round(width * (rows / height), 7))) // 2
        return np.arange(above, rows - above), np.arange(left, columns - left)

    def _features(self, rows: np.ndarray, columns: np.ndarray, across: int) -> np.ndarray:
        """[rows, columns]: the number of each feature. The whole picture has the first ones, tiles follow line by
        line."""
        tile = 1 + rows[:, None] // self.side * across + columns[None] // self.side
        numbers: np.ndarray = tile * self.side**2 + rows[:, None] % self.side * self.side + columns[None] % self.side
        return numbers


def _smaller(features: np.ndarray, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """[rows, columns, 4] features and their shares: what bilinear interpolation to this size reads."""
    top, bottom, below = _between(features.shape[0], rows)
    left, right, beside = _between(features.shape[1], columns)
    corners = [features[np.ix_(y, x)] for y in (top, bottom) for x in (left, right)]
    shares = [np.outer(h, w) for h in (1 - below, below) for w in (1 - beside, beside)]
    return np.stack(corners, axis=-1), np.stack(shares, axis=-1)


def _between(old: int, new: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two neighbours for each of `new` places along `old` ones, and the share of the second; centres lie evenly."""
    scale = np.float32(old) / np.float32(new)
    places = np.maximum((np.arange(new, dtype=np.float32) + np.float32(0.5)) * scale - np.float32(0.5), np.float32(0))
    first = np.minimum(places.astype(np.int64), old - 1)
    return first, np.minimum(first + 1, old - 1), (places - first).astype(np.float32)
