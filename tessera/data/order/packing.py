"""Pack samples into rows: by length, or into rows of equal FLOPs.

No sample is split. All rows have the same number of tokens with padding, so FLOPs that are linear in tokens are equal.
Rows differ in the *excess* of their samples: images, and attention over long texts. Balanced packing first packs by
length, with a little space left in every row. Then rows with high and low excess swap samples of about the same length.
All values are integers, so the result is the same on every machine.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

SPARE = 128  # 1 / 128 of a row stays free before swapping: full rows can swap nothing
CLOSE = 400  # swapping ends if no row has over 1 / 400 more FLOPs than the mean, or than its heaviest sample
ROUNDS = 144  # limit of the rounds of swaps
REACH = 48  # swapped samples are at most this many places apart in the list of samples sorted by length
MIN_GAIN = 0.005  # if balancing saves less than this share of a step's time, rows go to the ranks in turn
QUIET_ROUNDS = 24  # swapping ends after 24 consecutive rounds without a swap


def best_fit(tokens: np.ndarray, capacity: int, most: int | None = None) -> np.ndarray:
    """Return the row index of each sample: longest first, each into the fullest row with enough space (best fit).

    A sample of more than `capacity` and at most `most` tokens gets a row for itself.
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
    """Return the row index of each sample: longest first, each into the emptiest of `rows` rows.

    So every row gets long and short samples. A sample that fits into no row gets a further row.
    """
    row_of = np.empty(len(tokens), dtype=np.int64)
    longest_first = np.argsort(-tokens.astype(np.int64), kind="stable")
    filled = [(0, row) for row in range(rows)]  # heap of (number of tokens in the row, row)
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
    """Return the row index of each sample. Samples keep their order: one that does not fit begins a new row."""
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
    """Return the row index of each sample, so that rows have about equal FLOPs.

    `excess`: FLOPs of each sample minus those of as many padding tokens. `linear`: FLOPs of a row of only padding.
    """
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
    """Return whether each row has at most `slack` FLOPs more than the larger of the mean and its heaviest sample."""
    least = np.full(len(held), mean, dtype=np.int64)
    np.maximum.at(least, row_by_length, weight)
    return bool((held <= least + slack).all())


def _spread(tokens: np.ndarray, capacity: int) -> np.ndarray:
    """Return the row index of each sample: by `even_fit`, or by `best_fit` if that needs clearly fewer rows."""
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
    """Swap samples that are `apart` places apart when sorted by length, if the FLOPs of their rows become more equal.

    Each row takes part in at most one swap, the best one for both rows. The arguments are changed in place. Return the
    number of swaps.
    """
    first_rows, second_rows = row_by_length[:-apart], row_by_length[apart:]
    gap = held[first_rows] - held[second_rows]
    moved = weight[:-apart] - weight[apart:]
    longer = size[:-apart] - size[apart:]
    gain = moved * (gap - moved)  # half of the decrease of the sum of the squared FLOPs of both rows
    fits = (gain > 0) & (used[second_rows] + longer <= capacity) & (used[first_rows] - longer <= capacity)
    candidates = np.flatnonzero(fits)
    if len(candidates) == 0:
        return 0
    candidates = candidates[np.argsort(-gain[candidates], kind="stable")]
    partners = np.stack([first_rows[candidates], second_rows[candidates]], axis=1).reshape(-1)
    first = np.full(len(held), -1, dtype=np.int64)
    # Assign in reverse order: numpy keeps the last value for a repeated index, which is the first position of a row.
    first[partners[::-1]] = np.arange(len(partners))[::-1]
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
    """Assign the rows of a step to ranks and micro-batches. Return indices [ranks, micro-batches, micro_batch].

    Micro-batches that run at the same time get about the same work, and so do the ranks in total. If the work is
    unknown, balancing gains less than `MIN_GAIN`, or each rank gets one row, rows are distributed in turn. All ranks
    compute the same result.
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
    """Return row indices [ranks, micro_batch]: the rows `together`, heaviest first, with about equal work per rank."""
    laps = together.reshape(micro_batch, ranks)
    batches, held = np.empty((ranks, micro_batch), dtype=np.int64), np.zeros(ranks)
    for lap, row in enumerate(laps):
        light = np.argsort(held, kind="stable")
        batches[light, lap] = row
        held[light] += weights[row]
    return batches


def _time(weights: np.ndarray) -> float:
    """Return the relative time of a step: ranks wait for the slowest after each micro-batch and at its end."""
    by_batch = weights.sum(axis=2)  # [ranks, micro-batches]
    return float(by_batch.max(axis=0).sum() + by_batch.sum(axis=1).max())
