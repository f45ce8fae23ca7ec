"""Packing into rows of equal work.

A row is as long as every other (padding included), so what is linear in tokens costs the same in each; what differs is
the *excess* of its samples: pictures, and attention over long texts. Samples are first packed by length alone, with a
little room left in every row; then rows that are heavy and rows that are light trade samples of about the same length.
All of it in integers: the result is the same on every machine.
"""

from __future__ import annotations

import numpy as np

from tessera.data.order.fit import best_fit, even_fit

SPARE = 128  # a row keeps 1/128 of its tokens free: one that is full to the brim can trade nothing
CLOSE = 400  # rows within 1/400 of the mean work are good enough
ROUNDS = 144  # of trading, at most
REACH = 48  # how far apart, in the order of their lengths, two samples that are traded may be
PATIENCE = 24  # rounds without a trade before it ends


def pack_balanced(tokens: np.ndarray, excess: np.ndarray, capacity: int, linear: int) -> np.ndarray:
    """Row of each sample. `linear`: work of a row of `capacity` tokens before any excess."""
    row_of = _spread(tokens, capacity)
    rows = int(row_of.max()) + 1
    held = np.bincount(row_of, weights=excess, minlength=rows).astype(np.int64)
    used = np.bincount(row_of, weights=tokens, minlength=rows).astype(np.int64)
    mean = int(held.sum()) // rows
    slack = (linear + mean) // CLOSE
    by_length = np.argsort(tokens, kind="stable")
    size, weight = tokens[by_length], excess[by_length]
    place = row_of[by_length]
    quiet = 0
    for turn in range(ROUNDS):
        if quiet >= PATIENCE or (turn % 8 == 0 and _even(place, weight, held, mean, slack)):
            break
        apart = 1 + turn % min(REACH, max(1, len(size) - 1))
        traded = _trade(place, size, weight, held, used, capacity, apart)
        quiet = 0 if traded else quiet + 1
    row_of[by_length] = place
    return row_of


def _even(place: np.ndarray, weight: np.ndarray, held: np.ndarray, mean: int, slack: int) -> bool:
    """Whether no row is much heavier than the mean, or than its heaviest sample, which no trade can help."""
    least = np.full(len(held), mean, dtype=np.int64)
    np.maximum.at(least, place, weight)
    return bool((held <= least + slack).all())


def _spread(tokens: np.ndarray, capacity: int) -> np.ndarray:
    """Rows alike in their mixture of long and short samples, unless that takes more rows than the tightest packing."""
    reach = capacity - capacity // SPARE
    tight = best_fit(tokens, reach, capacity)
    least = int(tight.max()) + 1
    even = even_fit(tokens, capacity, -(-int(tokens.sum()) // reach))
    return even if int(even.max()) + 1 <= least + least // SPARE else tight


def _trade(
    place: np.ndarray,
    size: np.ndarray,
    weight: np.ndarray,
    held: np.ndarray,
    used: np.ndarray,
    capacity: int,
    apart: int,
) -> int:
    """One round: samples that stand `apart` in the order of lengths change rows where that brings the work of the two
    rows closer together. A row takes part in one trade at most, the best one for both. Changes its arguments."""
    one, two = place[:-apart], place[apart:]
    gap = held[one] - held[two]
    moved = weight[:-apart] - weight[apart:]
    longer = size[:-apart] - size[apart:]
    gain = moved * (gap - moved)  # by which the squares of the two sums shrink, halved
    fits = (gain > 0) & (used[two] + longer <= capacity) & (used[one] - longer <= capacity)
    found = np.flatnonzero(fits)
    if len(found) == 0:
        return 0
    found = found[np.argsort(-gain[found], kind="stable")]
    partners = np.stack([one[found], two[found]], axis=1).reshape(-1)
    first = np.full(len(held), -1, dtype=np.int64)
    first[partners[::-1]] = np.arange(len(partners))[::-1]  # of repeated places the last one written stays
    best = (first[partners[0::2]] // 2 == np.arange(len(found))) & (first[partners[1::2]] // 2 == np.arange(len(found)))
    chosen = found[best]
    here, there = place[chosen], place[chosen + apart]
    held[here] -= moved[chosen]
    held[there] += moved[chosen]
    used[here] -= longer[chosen]
    used[there] += longer[chosen]
    place[chosen], place[chosen + apart] = there, here
    return len(chosen)
