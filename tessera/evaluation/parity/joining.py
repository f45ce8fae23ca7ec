"""Join the shards that the ranks of a recording have of one tensor.

Parameters and gradients of parameters name their offsets in the unsharded tensor. Outputs of modules do not: a rank
that shares a layer with others has all of the output, some of its features, or some of its tokens. The
shape in the other recording tells which: shards are joined along the dimension in which they are smaller.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from tessera.evaluation.parity.recording import RankRecord, Recording, TensorEntry
from tessera.parallel.sequence_sharding import SequenceSharding

_SHARED = ("cp_ring", "cp_ulysses", "tp_outer", "tp")  # mesh axes whose ranks compute a micro-batch together
_DATA = ("dp_replicate", "dp_shard", "ep")


@dataclass(frozen=True)
class RecordedShard:
    """Hold what one rank recorded of a tensor."""

    entry: TensorEntry
    rank: RankRecord

    @property
    def elements(self) -> Tensor | None:
        return None if self.entry.key is None else self.rank.tensors[self.entry.key]

    def at(self, axes: Sequence[str]) -> int:
        """Return the position of the rank among the ranks of some axes."""
        position = 0
        for axis in axes:
            position = position * self.rank.sizes.get(axis, 1) + self.rank.position.get(axis, 0)
        return position

    @property
    def encoder(self) -> tuple[str, int] | None:
        """Return how the ranks share the encoder that this tensor belongs to, see `RankRecord.encoders`."""
        modules = (module for module in self.rank.encoders if f"{self.entry.name}.".startswith(f"{module}."))
        return next((self.rank.encoders[module] for module in modules), None)

    @property
    def sequence_position(self) -> int:
        """Return the position of the rank among those that share the sequence."""
        return self.at(_SHARED[:2]) if self.encoder is None else self.encoder[1]

    def batch_tensor(self, name: str) -> Tensor | None:
        """Return tensor `name` of this shard's micro-batch; None unless it was recorded completely."""
        entry, entries = self.entry, self.rank.entries
        same = (e for e in entries if (e.step, e.moment, e.name, e.rows) == (entry.step, "data", name, entry.rows))
        key = next((e.key for e in same if e.stride == 1), None)
        return None if key is None else self.rank.tensors[key]


@dataclass
class JoinedTensor:
    """Hold a tensor of one recording, joined from shards. `tensor`: recorded elements; None: only statistics."""

    shards: list[RecordedShard]
    tensor: Tensor | None
    shape: list[int]
    stride: int = 1
    replicas: list[Tensor] = field(default_factory=list)  # copies of the tensor on other ranks
    partial: bool = False  # whether the replicas can be terms of a sum instead of copies

    @property
    def entry(self) -> TensorEntry:
        return self.shards[0].entry

    @property
    def norm(self) -> float:
        return math.sqrt(sum(shard.entry.norm**2 for shard in self.shards))

    @property
    def not_finite(self) -> int:
        return sum(shard.entry.not_finite for shard in self.shards)

    def moved(self, which: str) -> float | None:
        """Return how much rounding changes the joined tensor. `which`: `moved_max`, `moved_rms` or `moved_norm`."""
        values = [getattr(shard.entry, which) for shard in self.shards]
        measured = [value for value in values if value is not None]
        return max(measured) if measured else None


Identity = tuple[int, str, str, int, int]  # what identifies a recorded tensor, as `TensorEntry.identity` returns it
ByRows = dict[str, list[RecordedShard]]
Groups = dict[Identity, ByRows]


def grouped(recording: Recording) -> Groups:
    """Return the shards of a recording by identity, then by rows of the micro-batch."""
    groups: Groups = {}
    for rank in recording.ranks:
        for entry in rank.entries:
            groups.setdefault(entry.identity, {}).setdefault(entry.rows, []).append(RecordedShard(entry, rank))
    for by_rows in groups.values():
        for rows, shards in by_rows.items():  # if several stages run a module, the last one of them has its output
            last = max(shard.entry.stage for shard in shards)
            by_rows[rows] = [shard for shard in shards if shard.entry.stage == last]
    return groups


def join(shards: Sequence[RecordedShard], like: Sequence[int]) -> JoinedTensor | None:
    """Join shards into one tensor; None if they do not fit. `like`: the shape of the tensor in the other recording."""
    first = shards[0].entry
    if any(shard.elements is None for shard in shards):
        return _only_statistics(shards, like)
    if first.offsets is not None and first.whole is not None:
        return _by_offsets(shards)
    if len(shards) == 1 or _elements(first.shape) == _elements(like):
        return _replicas(shards)
    return _by_shape(shards, list(like))


def _elements(shape: Sequence[int]) -> list[int]:
    """Return a shape without leading 1s: other libraries add them for the batch."""
    trimmed = list(shape)
    while len(trimmed) > 1 and trimmed[0] == 1:
        del trimmed[0]
    return trimmed


def _only_statistics(shards: Sequence[RecordedShard], like: Sequence[int]) -> JoinedTensor | None:
    """Return the statistics of shards that make up a tensor of this size without overlap."""
    distinct = list({str((s.entry.offsets, s.at(_SHARED))): s for s in shards}.values())
    if prod(shards[0].entry.shape) == prod(like):
        distinct = distinct[:1]
    if sum(prod(shard.entry.shape) for shard in distinct) != prod(like):
        return None
    return JoinedTensor(distinct, None, list(like))


def _replicas(shards: Sequence[RecordedShard]) -> JoinedTensor | None:
    tensors = [shard.elements for shard in shards if shard.elements is not None]
    entry = shards[0].entry
    same = [tensor for tensor in tensors[1:] if tensor.shape == tensors[0].shape]
    if len(same) < len(tensors) - 1:
        return None
    partial = entry.moment == "output_gradient"
    return JoinedTensor([shards[0]], tensors[0], list(entry.shape), entry.stride, same, partial)


def _by_offsets(shards: Sequence[RecordedShard]) -> JoinedTensor | None:
    whole = shards[0].entry.whole or []
    stride = max(shard.entry.stride for shard in shards)
    first = shards[0].elements
    if first is None or any(s.entry.whole != whole or s.entry.offsets is None for s in shards):
        return None
    rows = -(-whole[0] // stride) if whole else 1
    if rows * prod(whole[1:]) > 8 * sum(prod(s.entry.shape) for s in shards) + 64:  # the stated sizes are forged
        return None
    joined = torch.zeros([rows, *whole[1:]] if whole else [], dtype=first.dtype)
    covered, replicas, distinct = torch.zeros(joined.shape, dtype=torch.bool), [], []
    for shard in shards:
        entry, elements = shard.entry, shard.elements
        offsets = entry.offsets or []
        assert elements is not None
        if whole:
            start = -(offsets[0] if offsets else 0) % entry.stride
            numbers = torch.arange(start, entry.shape[0], entry.stride) + offsets[0]
            chosen = numbers % stride == 0
            elements, numbers = elements[chosen], numbers[chosen] // stride
            sides = [slice(at, at + size) for at, size in zip(offsets[1:], entry.shape[1:], strict=True)]
            where: tuple[Any, ...] = (numbers, *sides)
        else:
            where = ()
        inside = all(o >= 0 and o + n <= w for o, n, w in zip(offsets, entry.shape, whole, strict=True))
        if not inside:
            return None
        # another copy of the same part, such as on a replicated rank
        if elements.numel() and bool(covered[where].any()):
            copy = joined.clone()
            copy[where] = elements
            replicas.append(copy)
            continue
        joined[where], covered[where] = elements, True
        distinct.append(shard)
    return JoinedTensor(distinct, joined, whole, stride, replicas) if bool(covered.all()) else None


def _by_shape(shards: Sequence[RecordedShard], like: list[int]) -> JoinedTensor | None:
    """Join the shards of ranks with tensor and context parallelism. Each of them splits one dimension."""
    if len(shards[0].entry.shape) != len(like):
        return None
    parts = sorted({shard.at(_SHARED): shard for shard in reversed(shards)}.items())
    by_context: dict[int, list[RecordedShard]] = {}
    for _, shard in parts:
        by_context.setdefault(shard.sequence_position, []).append(shard)
    pieces: list[tuple[Tensor, Tensor]] = []  # row indices, and the rows
    for group in by_context.values():
        first, tensors = group[0].entry, [shard.elements for shard in group if shard.elements is not None]
        rows = torch.arange(0, first.shape[0], first.stride)
        if any(tensor.shape != tensors[0].shape for tensor in tensors):
            return None
        features = next((d for d in range(1, len(like)) if first.shape[d] != like[d]), None)
        if features is not None:
            pieces.append((rows, torch.cat(tensors, dim=features)))
        elif len(by_context) == 1 and first.shape[0] * len(group) == like[0]:  # split by rows: sequence parallelism
            pieces += [(rows + number * first.shape[0], tensor) for number, tensor in enumerate(tensors)]
        else:
            pieces.append((rows, tensors[0]))
    if len(by_context) > 1:
        order = _row_numbers([group[0] for group in by_context.values()])
        if order is None:
            return None
        pieces = [(numbers[rows], piece) for numbers, (rows, piece) in zip(order, pieces, strict=True)]
    stride = max(shard.entry.stride for shard in shards)
    joined = torch.zeros([-(-like[0] // stride), *like[1:]], dtype=pieces[0][1].dtype)
    covered = torch.zeros(len(joined), dtype=torch.bool)
    for numbers, piece in pieces:
        chosen = (numbers % stride == 0) & (numbers < like[0])
        if piece.shape[1:] != joined.shape[1:]:
            return None
        joined[numbers[chosen] // stride], covered[numbers[chosen] // stride] = piece[chosen], True
    return JoinedTensor([s for _, s in parts], joined, like, stride) if bool(covered.all()) else None


def _row_numbers(shards: Sequence[RecordedShard]) -> list[Tensor] | None:
    """Return the indices of the rows of the joined tensor on each rank that shares a sequence; None: unknown."""
    counts, first = [shard.entry.shape[0] for shard in shards], shards[0]
    total, encoder = sum(counts), first.encoder
    if encoder is None:
        ring, ulysses, unit = first.rank.split or [1, len(shards), 1]
        sharding = SequenceSharding(ring, ulysses, unit)
        ranges = [sharding.ranges(total, shard.sequence_position) for shard in shards]
        numbers = [torch.cat([torch.arange(start, end) for start, end in parts]) for parts in ranges]
    else:  # a batch tensor has each element's index in the all-gathered parts, which are padded to the longest one
        order = first.batch_tensor(encoder[0])
        if order is None or not len(order) or total % len(order):
            return None
        rows = total // len(order)  # number of rows per element
        longest = max(counts) // rows
        numbers = []
        for shard in shards:
            elements = (order // longest == shard.sequence_position).nonzero().flatten()
            numbers.append((elements[:, None] * rows + torch.arange(rows)).flatten())
    return numbers if [len(part) for part in numbers] == counts else None
