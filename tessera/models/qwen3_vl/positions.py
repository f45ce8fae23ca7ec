"""The learned table of positions, stretched over the grid of a picture: computed where batches are made."""

from __future__ import annotations

import numpy as np


def between_entries(places: np.ndarray, height: int, width: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Of patches at `places` [P, 2] in a grid of `height` x `width`: the four entries of a table of `side` x `side`
    that each lies between, [P, 4], and how much of each, [P, 4]. Corners of grid and table fall together."""
    rows, row_shares = _along(places[:, 0], height, side)
    columns, column_shares = _along(places[:, 1], width, side)
    index = (rows[:, :, None] * side + columns[:, None, :]).reshape(-1, 4)
    return index, (row_shares[:, :, None] * column_shares[:, None, :]).reshape(-1, 4)


def _along(places: np.ndarray, size: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """The two neighbours of each place along one axis, and the share of each; in fp32, as the reference computes it."""
    at = places.astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
    first = np.floor(at)
    near = at - first
    neighbours = np.stack([first, first + 1], axis=1).astype(np.int64).clip(0, side - 1)
    return neighbours, np.stack([1 - near, 1 - (1 - near)], axis=1)  # each by its distance
