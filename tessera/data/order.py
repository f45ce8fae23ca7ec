"""Which samples share a row, and which row comes when: pure functions of (seed, lengths, length, row number).

Nothing here knows ranks, workers or micro-batches, so any of them may change between two runs. Randomness is an integer
hash written out below rather than a library's generator: the order of a run that is resumed after an upgrade of numpy
must be the order it began with.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

WINDOW = 8192  # samples packed together: large enough for full rows, small enough that neighbours stay well mixed
_MASK = (1 << 64) - 1


def mix(*values: int) -> int:
    """A 64-bit hash of some integers: the same on every machine and in every version."""
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = _scramble((state ^ (value & _MASK)) + 0x9E3779B97F4A7C15)
    return state


def _scramble(x: int) -> int:
    x &= _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def permutation(count: int, *key: int) -> np.ndarray:
    """A shuffle of range(count) that depends on `key` alone: numbers sorted by their hash."""
    x = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(mix(*key))
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(x ^ (x >> np.uint64(31)), kind="stable")


@dataclass(frozen=True, eq=False)
class Packs:
    """Rows before they are ordered: row i holds samples members[bounds[i]:bounds[i+1]]."""

    members: np.ndarray  # [N] int64
    bounds: np.ndarray  # [R + 1] int64

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.members[self.bounds[row] : self.bounds[row + 1]]

    @staticmethod
    def of(rows: list[list[int]]) -> Packs:
        bounds = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum([len(row) for row in rows], out=bounds[1:])
        members = np.fromiter((i for row in rows for i in row), dtype=np.int64, count=int(bounds[-1]))
        return Packs(members, bounds)


def make_packs(lengths: np.ndarray, capacity: int, seed: int, *, pack: bool = True, shuffle: bool = True) -> Packs:
    """Every sample in exactly one row of at most `capacity` tokens. A sample is never cut."""
    count = len(lengths)
    assert count == 0 or int(lengths.max()) <= capacity, "samples that are too long are dropped by the index"
    if not pack:
        return Packs(np.arange(count, dtype=np.int64), np.arange(count + 1, dtype=np.int64))
    if not shuffle:
        return Packs.of(_in_order(lengths, capacity))
    order = permutation(count, seed, 0x5041434B)  # its own stream, apart from the epochs'
    rows: list[list[int]] = []
    for start in range(0, count, WINDOW):
        rows.extend(_best_fit(order[start : start + WINDOW], lengths, capacity))
    return Packs.of(rows)


def _in_order(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    rows: list[list[int]] = []
    room = -1
    for sample, length in enumerate(lengths.tolist()):
        if length > room:
            rows.append([])
            room = capacity
        rows[-1].append(sample)
        room -= length
    return rows


def _best_fit(samples: np.ndarray, lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Longest first, each into the fullest row that still has room for it."""
    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room left, row), sorted
    longest_first = samples[np.argsort(-lengths[samples].astype(np.int64), kind="stable")]
    for sample, length in zip(longest_first.tolist(), lengths[longest_first].tolist(), strict=True):
        at = bisect_left(rooms, (length, -1))
        if at < len(rooms):
            room, row = rooms.pop(at)
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(sample)
        insort(rooms, (room - length, row))
    return [sorted(row) for row in rows]


@dataclass(frozen=True, eq=False)
class Order:
    """Row number -> samples, over all epochs. The rows are the same in every epoch, their order is not."""

    packs: Packs
    seed: int
    shuffle: bool = True

    def __len__(self) -> int:
        return len(self.packs)

    def epoch(self, number: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(len(self.packs))
        return permutation(len(self.packs), self.seed, 0x45504F43, number)

    def row_seed(self, row: int) -> int:
        """Randomness that belongs to this row wherever it is computed; fits a signed 64-bit integer."""
        return mix(self.seed, 0x524F57, row) >> 1
