"""Shuffles that are computed point by point: where one place goes is known without looking at any other.

The integers are written out here rather than drawn from a library's generator: the order of a run that is resumed after
an upgrade of numpy must be the order it began with.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

ROUNDS = 6
_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix(*values: int) -> int:
    """A 64-bit hash of some integers: the same on every machine and in every version."""
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
    """A permutation of range(count) that depends on a key alone: a Feistel network over the next power of four, walked
    until it lands inside the range."""

    count: int
    half: int  # bits of each side of the network
    keys: tuple[int, ...]

    @staticmethod
    def of(count: int, *key: int) -> Shuffle:
        half = max(1, (max(1, count - 1).bit_length() + 1) // 2)
        base = mix(*key)
        return Shuffle(count, half, tuple(mix(base, number) for number in range(ROUNDS)))

    def __call__(self, place: int) -> int:
        assert 0 <= place < self.count
        side = (1 << self.half) - 1
        while True:
            left, right = place >> self.half, place & side
            for key in self.keys:
                left, right = right, left ^ (_scramble(right * _STEP + key) & side)
            place = left << self.half | right
            if place < self.count:
                return place

    def all(self) -> np.ndarray:
        """Of every place at once."""
        places = np.arange(self.count, dtype=np.uint64)
        outside = np.arange(self.count)
        while len(outside):
            places[outside] = self._once(places[outside])
            outside = outside[places[outside] >= self.count]
        return places.astype(np.int64)

    def _once(self, places: np.ndarray) -> np.ndarray:
        half, side = np.uint64(self.half), np.uint64((1 << self.half) - 1)
        left, right = places >> half, places & side
        for key in self.keys:
            left, right = right, left ^ (_scramble_all(right * np.uint64(_STEP) + np.uint64(key)) & side)
        joined: np.ndarray = left << half | right
        return joined


def permutation(count: int, *key: int) -> np.ndarray:
    """The whole shuffle as an array."""
    return Shuffle.of(count, *key).all()
