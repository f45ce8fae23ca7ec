"""Windows of a frame, and the order of its tokens that puts each window in one run. Computed once, on the host."""

from __future__ import annotations

import numpy as np


def window_order(rows: int, columns: int, side: int) -> np.ndarray:
    """Numbers of a frame's tokens, window by window, each row by row. Windows at the far edges may be smaller."""
    window = (np.arange(rows) // side)[:, None] * -(-columns // side) + np.arange(columns) // side
    return np.argsort(window.reshape(-1), kind="stable")


def window_sizes(rows: int, columns: int, side: int) -> list[int]:
    """Tokens of each window, in that order."""
    return [high * wide for high in _cuts(rows, side) for wide in _cuts(columns, side)]


def _cuts(length: int, side: int) -> list[int]:
    return [min(side, length - start) for start in range(0, length, side)]
