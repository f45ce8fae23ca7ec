"""Which entries of the learned table of positions a patch is given, and how much of each.

The table is a square picture of positions. A picture of another size reads it between its entries by cubic
convolution: sixteen of them, of which those beyond an edge are the edge's own.
"""

from __future__ import annotations

import numpy as np

SHARPNESS = -0.75  # the constant of the cubic kernel that `torch.nn.functional.grid_sample` uses


def between_entries(places: np.ndarray, height: int, width: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Of patches at `places` [P, 2] (row, column) of `height` x `width`: indices [P, 16] into the table of `side` x
    `side` entries, and weights [P, 16] in fp32."""
    rows, row_weights = _along(height, side)
    columns, column_weights = _along(width, side)
    row, column = places.T
    index = rows[row][:, :, None] * side + columns[column][:, None, :]
    weights = row_weights[row][:, :, None] * column_weights[column][:, None, :]
    return index.reshape(len(places), 16), weights.reshape(len(places), 16).astype(np.float32)


def _along(patches: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Along one axis, for each of its patches: four entries, and how much of each."""
    at = (np.arange(patches) + 0.5) * side / patches - 0.5  # centres of patches, in entries
    first = np.floor(at)
    apart = np.abs(at[:, None] - (first[:, None] + np.arange(-1, 3)))  # from each of the four, at most 2
    near = ((SHARPNESS + 2) * apart - (SHARPNESS + 3)) * apart**2 + 1
    far = SHARPNESS * (((apart - 5) * apart + 8) * apart - 4)
    entries = np.clip(first[:, None].astype(np.int64) + np.arange(-1, 3), 0, side - 1)
    return entries, np.where(apart <= 1, near, far)
