"""Packing by length: every sample whole, in one row, and rows as full as can be."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort

import numpy as np


def best_fit(tokens: np.ndarray, capacity: int, most: int | None = None) -> np.ndarray:
    """Row of each sample: longest first, each into the fullest row that still has room for it. Samples longer than
    `capacity`, up to `most`, stand alone."""
    assert len(tokens) == 0 or int(tokens.max()) <= (most or capacity), "what is too long is left out by the index"
    row_of = np.empty(len(tokens), dtype=np.int64)
    longest_first = np.argsort(-tokens.astype(np.int64), kind="stable")
    rows = 0
    rooms: list[tuple[int, int]] = []  # (room left, row), sorted
    chosen: list[int] = []
    for length in tokens[longest_first].tolist():
        at = bisect_left(rooms, (length, -1))
        if at < len(rooms):
            room, row = rooms.pop(at)
        else:
            room, row = capacity, rows
            rows += 1
        chosen.append(row)
        if room > length:
            insort(rooms, (room - length, row))
    row_of[longest_first] = chosen
    return row_of


def even_fit(tokens: np.ndarray, capacity: int, rows: int) -> np.ndarray:
    """Row of each sample: longest first, each into the emptiest of `rows` rows, so that every row gets long ones and
    short ones; a further row is opened for one that fits nowhere."""
    row_of = np.empty(len(tokens), dtype=np.int64)
    longest_first = np.argsort(-tokens.astype(np.int64), kind="stable")
    filled = [(0, row) for row in range(rows)]  # a heap
    chosen: list[int] = []
    for length in tokens[longest_first].tolist():
        used, row = filled[0]
        if used + length <= capacity:
            heapq.heapreplace(filled, (used + length, row))
        else:
            row = len(filled)
            heapq.heappush(filled, (length, row))
        chosen.append(row)
    row_of[longest_first] = chosen
    return row_of


def in_order(tokens: np.ndarray, capacity: int) -> np.ndarray:
    """Row of each sample, where samples keep their order: a row is closed when the next one does not fit."""
    row_of = np.empty(len(tokens), dtype=np.int64)
    ends = np.cumsum(tokens, dtype=np.int64)
    start, row, before = 0, 0, 0
    while start < len(tokens):
        stop = max(start + 1, int(np.searchsorted(ends, before + capacity, side="right")))
        row_of[start:stop] = row
        start, row, before = stop, row + 1, int(ends[stop - 1])
    return row_of
