"""Sets with weights: how often each sample is drawn, in whole numbers.

One pass over the mixture has a fixed number of slots, so many for each set. A set with as many slots as samples gives
each sample its slot; with more or fewer, a slot holds one of a few neighbours, another one in each pass, such that
after any number of passes every sample of the set was drawn equally often, give or take one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np


def slots_of_sets(sizes: Sequence[int], weights: Sequence[float] | None) -> list[int]:
    """Slots of each set in one pass. A pass is as long as with no weights at all; a set that is not empty has one."""
    if weights is None:
        return list(sizes)
    total = sum(sizes)
    share = sum(weight for size, weight in zip(sizes, weights, strict=True) if size)
    return [
        max(1, int(total * weight / share + 0.5)) if size else 0 for size, weight in zip(sizes, weights, strict=True)
    ]


@dataclass(frozen=True, eq=False)
class Mixture:
    starts: np.ndarray  # [sets + 1]: first sample of each set
    slots: np.ndarray  # [sets + 1]: first slot of each set
    alike: np.ndarray | None  # samples of each set, such that neighbours are alike; None: as they are numbered

    def __len__(self) -> int:
        return int(self.slots[-1])

    def sample(self, slot: int, turn: int) -> int:
        """What a slot holds in a pass."""
        which = int(np.searchsorted(self.slots, slot, side="right")) - 1
        first, size = self._set(which)
        count = int(self.slots[which + 1] - self.slots[which])
        place = first + ((slot - int(self.slots[which])) * size + turn * count % size) // count
        return place if self.alike is None else int(self.alike[place])

    def largest(self, values: np.ndarray) -> np.ndarray:
        """For each slot, the largest value among the samples that it ever holds."""
        if self.alike is not None:
            values = values[self.alike]
        found = [self._largest(values, which) for which in range(len(self.starts) - 1)]
        return np.concatenate(found) if found else values[:0]

    def mean(self, values: np.ndarray) -> float:
        """Of one pass, its slots added up, on average over passes."""
        total = 0.0
        for which in range(len(self.starts) - 1):
            first, size = self._set(which)
            if size:
                share = int(self.slots[which + 1] - self.slots[which]) / size
                total += share * float(values[first : first + size].sum(dtype=np.float64))
        return total

    def _set(self, which: int) -> tuple[int, int]:
        return int(self.starts[which]), int(self.starts[which + 1] - self.starts[which])

    def _largest(self, values: np.ndarray, which: int) -> np.ndarray:
        first, size = self._set(which)
        count = int(self.slots[which + 1] - self.slots[which])
        own = values[first : first + size]
        if count == size:
            return own
        places = np.arange(count, dtype=np.int64) * size
        bounds = np.stack([places // count, (places + size - gcd(size, count)) // count + 1], axis=1).reshape(-1)
        return np.maximum.reduceat(np.append(own, own[:1]), bounds)[::2]


def alike_order(sets: np.ndarray, tokens: np.ndarray, excess: np.ndarray, step: int, ties: np.ndarray) -> np.ndarray:
    """An order in which neighbours are alike: set by set, by steps of a twentieth in excess (`step`: what is too little
    to matter), and up and down in tokens."""
    edges = [max(1, step)]
    while edges[-1] <= int(excess.max(initial=0)):
        edges.append(edges[-1] + edges[-1] // 20 + 1)
    bucket = np.searchsorted(np.array(edges), excess, side="right")
    snake = np.where(bucket % 2, -tokens, tokens)
    return np.lexsort((ties, snake, bucket, sets))
