"""Weighted mixtures of data sets: which sample each draw of an epoch takes, as a pure function of the seed.

A permutation is computed for single indices, without an array of all of them. It does not use numpy's generators,
because the order of a resumed run must not change with a new version of numpy.

An epoch has a fixed number of draws from each data set, by the weights. If a set has as many draws as samples, each
sample is drawn once. Otherwise a draw takes one of a few similar samples, another one in each epoch. After any number
of epochs, the samples of a set have been drawn equally often, up to a difference of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np

ROUNDS = 6
_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix(*values: int) -> int:
    """Return a 64-bit hash of integers, which is the same on every machine and in every version."""
    state = _STEP
    for value in values:
        state = _scramble((state ^ (value & _MASK)) + _STEP)
    return state


def _scramble(x: int) -> int:
    x &= _MASK
    x = ((x ^ (x >> 30)) * _FIRST) & _MASK
    x = ((x ^ (x >> 27)) * _SECOND) & _MASK
    return x ^ (x >> 31)


def _scramble_all(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_FIRST)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_SECOND)
    scrambled: np.ndarray = x ^ (x >> np.uint64(31))
    return scrambled


@dataclass(frozen=True)
class Shuffle:
    """Permute range(count), determined by a key.

    A Feistel network over the next power of four is applied again until the result is below `count`.
    """

    count: int
    half: int  # number of bits in each half of the Feistel network
    keys: tuple[int, ...]

    @staticmethod
    def of(count: int, *key: int) -> Shuffle:
        half = max(1, (max(1, count - 1).bit_length() + 1) // 2)
        base = mix(*key)
        return Shuffle(count, half, tuple(mix(base, number) for number in range(ROUNDS)))

    def __call__(self, index: int) -> int:
        assert 0 <= index < self.count
        side = (1 << self.half) - 1
        while True:
            high, low = index >> self.half, index & side
            for key in self.keys:
                high, low = low, high ^ (_scramble(low * _STEP + key) & side)
            index = high << self.half | low
            if index < self.count:
                return index

    def all(self) -> np.ndarray:
        """Return the full permutation as an array."""
        indices = np.arange(self.count, dtype=np.uint64)
        outside = np.arange(self.count)
        while len(outside):
            indices[outside] = self._once(indices[outside])
            outside = outside[indices[outside] >= self.count]
        return indices.astype(np.int64)

    def _once(self, indices: np.ndarray) -> np.ndarray:
        half, side = np.uint64(self.half), np.uint64((1 << self.half) - 1)
        high, low = indices >> half, indices & side
        for key in self.keys:
            high, low = low, high ^ (_scramble_all(low * np.uint64(_STEP) + np.uint64(key)) & side)
        joined: np.ndarray = high << half | low
        return joined


def permutation(count: int, *key: int) -> np.ndarray:
    """Return the permutation of range(count) with this key."""
    return Shuffle.of(count, *key).all()


def draws_per_set(sizes: Sequence[int], weights: Sequence[float] | None) -> list[int]:
    """Return how many samples an epoch draws from each data set; without weights, all samples once.

    With weights the sum is about the same. A data set that is not empty gets at least one draw.
    """
    if weights is None:
        return list(sizes)
    total = sum(sizes)
    share = sum(weight for size, weight in zip(sizes, weights, strict=True) if size)
    return [
        max(1, int(total * weight / share + 0.5)) if size else 0 for size, weight in zip(sizes, weights, strict=True)
    ]


@dataclass(frozen=True, eq=False)
class Mixture:
    """Map draws to samples. A draw is a slot of an epoch that takes one sample of its data set."""

    starts: np.ndarray  # [sets + 1]: index of the first sample of each data set
    draws: np.ndarray  # [sets + 1]: index of the first draw of each data set
    by_similarity: np.ndarray | None  # sample indices of each set, similar samples beside each other; None: not sorted

    def __len__(self) -> int:
        return int(self.draws[-1])

    def sample(self, draw: int, epoch: int) -> int:
        """Return the index of the sample that a draw takes in an epoch."""
        which = int(np.searchsorted(self.draws, draw, side="right")) - 1
        first, size = self._set(which)
        count = int(self.draws[which + 1] - self.draws[which])
        position = first + ((draw - int(self.draws[which])) * size + epoch * count % size) // count
        return position if self.by_similarity is None else int(self.by_similarity[position])

    def largest(self, values: np.ndarray) -> np.ndarray:
        """Return for each draw the largest of `values` over all samples that the draw takes in any epoch."""
        if self.by_similarity is not None:
            values = values[self.by_similarity]
        parts = [self._largest(values, which) for which in range(len(self.starts) - 1)]
        return np.concatenate(parts) if parts else values[:0]

    def mean(self, values: np.ndarray) -> float:
        """Return the sum of the values of one epoch's samples, averaged over epochs."""
        total = 0.0
        for which in range(len(self.starts) - 1):
            first, size = self._set(which)
            if size:
                share = int(self.draws[which + 1] - self.draws[which]) / size
                total += share * float(values[first : first + size].sum(dtype=np.float64))
        return total

    def _set(self, which: int) -> tuple[int, int]:
        return int(self.starts[which]), int(self.starts[which + 1] - self.starts[which])

    def _largest(self, values: np.ndarray, which: int) -> np.ndarray:
        first, size = self._set(which)
        count = int(self.draws[which + 1] - self.draws[which])
        of_set = values[first : first + size]
        if count == size:
            return of_set
        positions = np.arange(count, dtype=np.int64) * size
        bounds = np.stack([positions // count, (positions + size - gcd(size, count)) // count + 1], axis=1).reshape(-1)
        return np.maximum.reduceat(np.append(of_set, of_set[:1]), bounds)[::2]


def similarity_order(
    sets: np.ndarray, tokens: np.ndarray, excess: np.ndarray, step: int, ties: np.ndarray
) -> np.ndarray:
    """Sort samples so that neighbours are similar: by set, by excess FLOPs in steps of 5 %, by tokens.

    The number of tokens rises in one 5 % step and falls in the next, so that neighbours of two steps are similar, too.
    `step`: an excess below it counts as 0.
    """
    edges = [max(1, step)]
    while edges[-1] <= int(excess.max(initial=0)):
        edges.append(edges[-1] + edges[-1] // 20 + 1)
    bucket = np.searchsorted(np.array(edges), excess, side="right")
    snake = np.where(bucket % 2, -tokens, tokens)
    return np.lexsort((ties, snake, bucket, sets))
