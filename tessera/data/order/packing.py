"""Packing samples into rows: by length alone, or into rows of equal work.

Every sample is whole in one row. A row is as long as every other (padding included), so what is linear in tokens costs
the same in each; what differs is the *excess* of its samples: images, and attention over long texts. Balanced packing
first packs by length alone, with a little space left in every row; then heavy and light rows swap samples of about the
same length. All of it is done in integers: the result is the same on every machine.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

SPARE = 128  # a row keeps 1/128 of its tokens free: a full one can swap nothing
CLOSE = 400  # rows within 1/400 of the mean work are good enough
ROUNDS = 144  # of swaps, at most
REACH = 48  # how far apart, in the order of their lengths, two swapped samples may be
MIN_GAIN = 0.005  # a balanced split that saves less than this share of a step's time is not used
QUIET_ROUNDS = 24  # rounds without a swap before it ends


def best_fit(tokens: np.ndarray, capacity: int, most: int | None = None) -> np.ndarray:
    """Return the row of each sample: longest first, each into the fullest row that has space for it.

    Samples longer than `capacity`, up to `most`, are alone in their row.
    """
    assert len(tokens) == 0 or int(tokens.max()) <= (most or capacity), "the index leaves out longer samples"
    row_of = np.empty(len(tokens), dtype=np.int64)
    longest_first = np.argsort(-tokens.astype(np.int64), kind="stable")
    rows = 0
    spaces: list[tuple[int, int]] = []  # (tokens left, row), sorted
    chosen: list[int] = []
    for length in tokens[longest_first].tolist():
        at = bisect_left(spaces, (length, -1))
        if at < len(spaces):
            space, row = spaces.pop(at)
        else:
            space, row = capacity, rows
            rows += 1
        chosen.append(row)
        if space > length:
            insort(spaces, (space - length, row))
    row_of[longest_first] = chosen
    return row_of


def even_fit(tokens: np.ndarray, capacity: int, rows: int) -> np.ndarray:
    """Return the row of each sample: longest first, each into the emptiest of `rows` rows.

    Every row so gets long and short samples; a further row is opened for a sample that fits nowhere.
    """
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


def sequential_fit(tokens: np.ndarray, capacity: int) -> np.ndarray:
    """Return the row of each sample in the given order: a row is closed when the next sample does not fit."""
    row_of = np.empty(len(tokens), dtype=np.int64)
    ends = np.cumsum(tokens, dtype=np.int64)
    start, row, before = 0, 0, 0
    while start < len(tokens):
        stop = max(start + 1, int(np.searchsorted(ends, before + capacity, side="right")))
        row_of[start:stop] = row
        start, row, before = stop, row + 1, int(ends[stop - 1])
    return row_of


# ---------------------------------------------------------------------------------------------- equal work


def pack_balanced(tokens: np.ndarray, excess: np.ndarray, capacity: int, linear: int) -> np.ndarray:
    """Return the row of each sample. `linear`: work of a row of `capacity` tokens before any excess."""
    row_of = _spread(tokens, capacity)
    rows = int(row_of.max()) + 1
    held = np.bincount(row_of, weights=excess, minlength=rows).astype(np.int64)
    used = np.bincount(row_of, weights=tokens, minlength=rows).astype(np.int64)
    mean = int(held.sum()) // rows
    slack = (linear + mean) // CLOSE
    by_length = np.argsort(tokens, kind="stable")
    size, weight = tokens[by_length], excess[by_length]
    row_by_length = row_of[by_length]
    quiet = 0
    for round_number in range(ROUNDS):
        if quiet >= QUIET_ROUNDS or (round_number % 8 == 0 and _even(row_by_length, weight, held, mean, slack)):
            break
        apart = 1 + round_number % min(REACH, max(1, len(size) - 1))
        swapped = _swap(row_by_length, size, weight, held, used, capacity, apart)
        quiet = 0 if swapped else quiet + 1
    row_of[by_length] = row_by_length
    return row_of


def _even(row_by_length: np.ndarray, weight: np.ndarray, held: np.ndarray, mean: int, slack: int) -> bool:
    """Return whether no row is much heavier than the mean, or than its heaviest sample, which no swap can help."""
    least = np.full(len(held), mean, dtype=np.int64)
    np.maximum.at(least, row_by_length, weight)
    return bool((held <= least + slack).all())


def _spread(tokens: np.ndarray, capacity: int) -> np.ndarray:
    """Return rows with like mixtures of long and short samples, unless the tightest packing takes fewer rows."""
    reach = capacity - capacity // SPARE
    tight = best_fit(tokens, reach, capacity)
    least = int(tight.max()) + 1
    even = even_fit(tokens, capacity, -(-int(tokens.sum()) // reach))
    return even if int(even.max()) + 1 <= least + least // SPARE else tight


def _swap(
    row_by_length: np.ndarray,
    size: np.ndarray,
    weight: np.ndarray,
    held: np.ndarray,
    used: np.ndarray,
    capacity: int,
    apart: int,
) -> int:
    """Swap samples that stand `apart` in the order of lengths where that brings the work of their two rows closer.

    A row takes part in one swap at most, the best one for both. Changes its arguments; returns the number of swaps.
    """
    first_rows, second_rows = row_by_length[:-apart], row_by_length[apart:]
    gap = held[first_rows] - held[second_rows]
    moved = weight[:-apart] - weight[apart:]
    longer = size[:-apart] - size[apart:]
    gain = moved * (gap - moved)  # by which the squares of the two sums shrink, halved
    fits = (gain > 0) & (used[second_rows] + longer <= capacity) & (used[first_rows] - longer <= capacity)
    candidates = np.flatnonzero(fits)
    if len(candidates) == 0:
        return 0
    candidates = candidates[np.argsort(-gain[candidates], kind="stable")]
    partners = np.stack([first_rows[candidates], second_rows[candidates]], axis=1).reshape(-1)
    first = np.full(len(held), -1, dtype=np.int64)
    first[partners[::-1]] = np.arange(len(partners))[::-1]  # of repeated indices the last value written stays
    numbers = np.arange(len(candidates))
    best = (first[partners[0::2]] // 2 == numbers) & (first[partners[1::2]] // 2 == numbers)
    chosen = candidates[best]
    here, there = row_by_length[chosen], row_by_length[chosen + apart]
    held[here] -= moved[chosen]
    held[there] += moved[chosen]
    used[here] -= longer[chosen]
    used[there] += longer[chosen]
    row_by_length[chosen], row_by_length[chosen + apart] = there, here
    return len(chosen)


# ---------------------------------------------------------------------------------------------- rows of a step


def split_rows(work: Sequence[float] | None, rows: int, ranks: int, micro_batch: int) -> np.ndarray:
    """Return [ranks, micro-batches, micro_batch] indices among a step's rows: a pure function, the same on every rank.

    Micro-batches that run at the same time are made of rows of about the same work, and all ranks get the same in sum.
    Where rows cost the same, or each rank has one, rows go to ranks in turn.
    """
    plain = np.arange(rows).reshape(-1, ranks, micro_batch).transpose(1, 0, 2)
    if work is None or ranks == 1 or rows == ranks:
        return plain
    weights = np.asarray(work, dtype=np.float64)
    balanced = _balanced(weights, ranks, micro_batch)
    return balanced if _time(weights[balanced]) < (1 - MIN_GAIN) * _time(weights[plain]) else plain


def _balanced(weights: np.ndarray, ranks: int, micro_batch: int) -> np.ndarray:
    heaviest_first = np.argsort(-weights, kind="stable").reshape(-1, ranks * micro_batch)
    held = np.zeros(ranks)
    indices = np.empty((ranks, len(heaviest_first), micro_batch), dtype=np.int64)
    for number, together in enumerate(heaviest_first):
        batches = _micro_batches(together, weights, ranks, micro_batch)
        heavy = np.argsort(-weights[batches].sum(axis=1), kind="stable")
        light = np.argsort(held, kind="stable")
        indices[light, number] = np.sort(batches[heavy], axis=1)
        held[light] += weights[batches[heavy]].sum(axis=1)
    return indices


def _micro_batches(together: np.ndarray, weights: np.ndarray, ranks: int, micro_batch: int) -> np.ndarray:
    """Return [ranks, micro_batch] of equal weight: to and fro over the rows, heaviest first."""
    laps = together.reshape(micro_batch, ranks)
    batches, held = np.empty((ranks, micro_batch), dtype=np.int64), np.zeros(ranks)
    for lap, row in enumerate(laps):
        light = np.argsort(held, kind="stable")
        batches[light, lap] = row
        held[light] += weights[row]
    return batches


def _time(weights: np.ndarray) -> float:
    """Return the time of a step: ranks wait for each other between after every micro-batch and once at its end."""
    by_batch = weights.sum(axis=2)  # [ranks, micro-batches]
    return float(by_batch.max(axis=0).sum() + by_batch.sum(axis=1).max())
