"""Which tokens of a micro-batch, and which pieces of its media, a rank works on: plain arithmetic, on the host.

Tokens and patches are both called rows here: what lies along the first axis of an activation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Range = tuple[int, int]  # rows [start, end)


@dataclass(frozen=True)
class Split:
    """`ring` x `ulysses` ranks share rows; `unit` neighbouring rows stay together.

    Under a causal mask late rows see more than early ones. So a member of the ring owns a chunk near the beginning and
    its mirror image near the end, which makes work equal. Its rows are cut into as many parts as trade heads.
    """

    ring: int
    ulysses: int
    unit: int = 1

    @property
    def ranks(self) -> int:
        return self.ring * self.ulysses

    @property
    def least(self) -> int:
        """Fewer rows than these leave a rank without any."""
        return (2 * self.ring if self.ring > 1 else 1) * self.ulysses * self.unit

    def of_ring(self, rows: int, at: int) -> list[Range]:
        """What all ranks at one place of the ring own together."""
        if self.ring == 1:
            return [(0, rows)]
        return [self._part(rows, 2 * self.ring, chunk) for chunk in (at, 2 * self.ring - 1 - at)]

    def sizes(self, rows: int, at: int) -> list[int]:
        """How many of these each of the ranks there has."""
        joined = sum(end - start for start, end in self.of_ring(rows, at))
        parts = (self._part(joined, self.ulysses, place) for place in range(self.ulysses))
        return [end - start for start, end in parts]

    def own(self, rows: int, position: int) -> list[Range]:
        """What the rank at `position` owns: ring outermost."""
        at, place = divmod(position, self.ulysses)
        ranges = self.of_ring(rows, at)
        start, end = self._part(sum(stop - first for first, stop in ranges), self.ulysses, place)
        found: list[Range] = []
        for first, stop in ranges:
            low, high = max(first, first + start), min(stop, first + end)
            if low < high:
                found.append((low, high))
            start, end = start - (stop - first), end - (stop - first)
        return found

    def _part(self, rows: int, parts: int, number: int) -> Range:
        """As equal as can be: the lengths need not divide. Rows that make no whole unit go with the last ones."""
        units = rows // self.unit
        end = rows if number == parts - 1 else units * (number + 1) // parts * self.unit
        return units * number // parts * self.unit, end


def cut(tensor: Tensor, ranges: Sequence[Range], dim: int) -> Tensor:
    """Always a copy: a slice would keep the whole alive, and send it to whoever reads the batch."""
    return torch.cat([tensor.narrow(dim, start, end - start) for start, end in ranges], dim)


def indices(ranges: Sequence[Range]) -> Tensor:
    return torch.cat([torch.arange(start, end) for start, end in ranges]) if ranges else torch.empty(0).long()


def local_places(places: Tensor, ranges: Sequence[Range]) -> tuple[Tensor, Tensor]:
    """Of places among all rows: where those that are owned lie among the own rows, and which of the places they are."""
    found, which, before = [], [], 0
    for start, end in ranges:
        inside = ((places >= start) & (places < end)).nonzero().flatten()
        found.append(places[inside] - start + before)
        which.append(inside)
        before += end - start
    return torch.cat(found), torch.cat(which)


def deal(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Numbers of the pieces that each rank gets, in their order: long ones first, to whoever has least so far."""
    hands: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for number in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        least = loads.index(min(loads))
        hands[least].append(number)
        loads[least] += lengths[number]
    return [sorted(hand) for hand in hands]


def places_when_gathered(by_rank: Sequence[Tensor], rows: int) -> Tensor:
    """`by_rank` says which rows each rank has. They are gathered with every rank's share padded to the longest: where
    does each row lie then?"""
    longest = max((len(own) for own in by_rank), default=0)
    places = torch.zeros(rows, dtype=torch.int64)
    for rank, own in enumerate(by_rank):
        places[own] = rank * longest + torch.arange(len(own))
    return places
