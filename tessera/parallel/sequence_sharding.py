"""Shard micro-batches over ranks, on the host, in the loader's processes (`RankDataset`).

An *element* is an entry of the sequence dimension: a token of the main sequence, or of the input of an encoder. Context
parallel ranks each get a part of every sequence (`SequenceSharding`). Ranks that compute an encoder independently each
get full sequences (`assign_sequences`).
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tessera.core.batch import Batch, Segments
from tessera.core.model_plan import Stream
from tessera.core.row_source import RowSource
from tessera.core.sample import BadSample
from tessera.errors import TesseraError
from tessera.parallel.mesh import CONTEXT, DATA, Axes

Range = tuple[int, int]  # elements [start, end)


@dataclass(frozen=True)
class SequenceSharding:
    """Split a sequence over `ring` x `ulysses` ranks; `unit` neighbouring elements stay together.

    Under a causal mask late elements attend to more than early ones. So each ring position has a chunk near the
    beginning and the mirrored chunk near the end, which balances the work. The ulysses ranks of a ring position split
    both chunks.
    """

    ring: int
    ulysses: int
    unit: int = 1

    @property
    def ranks(self) -> int:
        return self.ring * self.ulysses

    @property
    def minimum(self) -> int:
        """Return the length of the shortest sequence that gives every rank at least one element."""
        return (2 * self.ring if self.ring > 1 else 1) * self.ulysses * self.unit

    def ring_ranges(self, length: int, at: int) -> list[Range]:
        """Return the two chunks, without a ring one, that the ulysses ranks at one ring position have together."""
        if self.ring == 1:
            return [(0, length)]
        return [self._part(length, 2 * self.ring, chunk) for chunk in (at, 2 * self.ring - 1 - at)]

    def sizes(self, length: int, at: int) -> list[int]:
        """Return how many elements of a sequence each ulysses rank has. `at`: position of these ranks in the ring."""
        joined = sum(end - start for start, end in self.ring_ranges(length, at))
        parts = (self._part(joined, self.ulysses, number) for number in range(self.ulysses))
        return [end - start for start, end in parts]

    def ranges(self, length: int, position: int) -> list[Range]:
        """Return the ranges of a rank. `position`: its ring position x `ulysses` + its position among ulysses ranks."""
        at, number = divmod(position, self.ulysses)
        joined = self.ring_ranges(length, at)
        start, end = self._part(sum(stop - first for first, stop in joined), self.ulysses, number)
        parts: list[Range] = []
        for first, stop in joined:
            low, high = max(first, first + start), min(stop, first + end)
            if low < high:
                parts.append((low, high))
            start, end = start - (stop - first), end - (stop - first)
        return parts

    def _part(self, length: int, parts: int, number: int) -> Range:
        """Return the range of part `number` if `length` elements are split into nearly equal `parts`.

        Parts have complete units only, except that the last part also gets an incomplete unit.
        """
        units = length // self.unit
        end = length if number == parts - 1 else units * (number + 1) // parts * self.unit
        return units * number // parts * self.unit, end


@dataclass(frozen=True)
class EncoderSharding:
    """Describe how the input of one encoder is split over ranks."""

    name: str
    stream: Stream
    dp: int = 1  # number of ranks that each compute some full sequences
    split: SequenceSharding | None = None  # how context parallel ranks split each sequence; None: not split
    attention: tuple[
        str, ...
    ] = ()  # attention modules of the encoder; they communicate in the context parallel group if `split` is set
    dp_view: str = ""  # mesh view of the `dp` ranks

    @property
    def dp_key(self) -> str:
        """Return the batch key of two entries: segments with the number of outputs of each dp rank, and a tensor with
        their order after the all-gather."""
        return f"{self.name}.dp"

    @property
    def cp_key(self) -> str:
        return f"{self.name}.cp"


@dataclass(frozen=True)
class BatchSharding:
    """Describe how a micro-batch is split over its context parallel and encoder ranks."""

    main: Stream
    split: SequenceSharding
    encoders: tuple[EncoderSharding, ...] = ()
    # other token sequences of the micro-batch, split like the main one
    sequences: Mapping[str, Stream] = field(default_factory=dict)


def too_short(length: int, minimum: int) -> TesseraError:
    return TesseraError(
        f"a micro-batch of {length} tokens is too short for the ranks that share it: they need at least {minimum}",
        where="parallel.cp",
        fix=f"raise data.length to {minimum} or more, or lower parallel.cp",
        code="layout.row-too-short",
    )


def shard_batch(batch: Batch, plan: BatchSharding, position: int, dp_positions: Mapping[str, int]) -> Batch:
    """Return a rank's part of a micro-batch. `position`: the rank's position in its context group.

    `dp_positions`: encoder -> the rank's position among the encoder's `dp` ranks. Segments of the main sequence are not
    sharded, because attention spans the full sequence. Slots and the tensors `Stream.positions` are changed to indices
    into this rank's elements. For each slot, the tensor `Stream.sources` has the index of its encoder output. Tensors
    with one entry per position, such as latents, are not sharded: the task selects this rank's entries.
    """
    tensors, segments = dict(batch.tensors), dict(batch.segments)
    if plan.split.ranks > 1:
        for name, stream in plan.sequences.items():
            _note_read(tensors, segments, name, stream, plan.split)
    ranges = {
        name: _split_tokens(tensors, segments, stream, plan.split, position)
        for name, stream in {"": plan.main, **plan.sequences}.items()
    }
    for encoder in plan.encoders:
        stream = encoder.stream
        slots = tensors.get(stream.slots, torch.empty(0, dtype=torch.int64))
        tensors[stream.slots], tensors[stream.sources(stream.slots)] = local_positions(slots, ranges[stream.within])
        _distribute_sequences(tensors, segments, encoder, dp_positions.get(encoder.name, 0))
        if encoder.split is not None:
            _split_sequences(tensors, segments, encoder, encoder.split, position)
    return replace(batch, tensors=tensors, segments=segments)


def _split_tokens(
    tensors: dict[str, Tensor], segments: dict[str, Segments], stream: Stream, split: SequenceSharding, position: int
) -> list[Range]:
    """Keep only this rank's part of a token sequence, and return its ranges."""
    length = tensors[stream.tensors[0]].shape[stream.dim]
    if split.ranks == 1:
        return [(0, length)]
    if length < split.minimum:
        raise too_short(length, split.minimum)
    ranges = split.ranges(length, position)
    _keep(tensors, stream, ranges)
    for name in stream.positions:
        if name in tensors:
            tensors[name], tensors[stream.sources(name)] = local_positions(tensors[name], ranges)
    if stream.index:
        tensors[stream.index] = indices(ranges)
    if stream.own_segments:
        segments[stream.own_segments] = Segments.of(lengths_inside(segments[stream.segments].lengths, ranges))
    return ranges


def _note_read(
    tensors: dict[str, Tensor], segments: dict[str, Segments], name: str, stream: Stream, split: SequenceSharding
) -> None:
    """Store the order of the hidden states at `Stream.read_at` after the all-gather over context parallel ranks."""
    positions, length = tensors[stream.read_at], tensors[stream.tensors[0]].shape[stream.dim]
    by_rank = [local_positions(positions, split.ranges(length, rank))[1] for rank in range(split.ranks)]
    _note_order(tensors, segments, read_key(name), by_rank, len(positions))


def read_key(name: str) -> str:
    """Return the batch key of the order and the numbers of states that are read of a second token sequence."""
    return f"{name}.cp"


def _distribute_sequences(
    tensors: dict[str, Tensor], segments: dict[str, Segments], encoder: EncoderSharding, position: int
) -> None:
    """Keep only this rank's encoder sequences. A rank without sequences runs the encoder on a blank input."""
    if encoder.dp == 1:
        return
    stream = encoder.stream
    lengths = segments[stream.segments].lengths if stream.segments in segments else ()
    assigned = assign_sequences(lengths, encoder.dp)
    ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
    ranges = [[(ends[n], ends[n + 1]) for n in numbers] for numbers in assigned]
    _note_order(tensors, segments, encoder.dp_key, [indices(rank_ranges) for rank_ranges in ranges], ends[-1])
    if assigned[position]:
        _keep(tensors, stream, ranges[position])
        segments[stream.segments] = Segments.of([lengths[n] for n in assigned[position]])
        if stream.windows in segments:
            segments[stream.windows] = Segments.of(_inside(segments[stream.windows].lengths, ranges[position]))
    else:
        for key in (stream.segments, stream.windows):
            segments.pop(key, None)
        for name in stream.tensors:
            tensors.pop(name, None)


def _split_sequences(
    tensors: dict[str, Tensor],
    segments: dict[str, Segments],
    encoder: EncoderSharding,
    split: SequenceSharding,
    position: int,
) -> None:
    """Keep only this rank's part of every encoder sequence.

    If there are fewer than `split.minimum` elements, zeros are appended as another sequence, so that all ranks have
    elements.
    """
    stream = encoder.stream
    lengths = segments[stream.segments].lengths if stream.segments in segments else ()
    length = sum(lengths)
    if length == 0:
        _note_order(tensors, segments, encoder.cp_key, [indices([])] * split.ranks, 0)
        return
    missing = split.minimum - length
    if missing > 0:
        for key in (stream.segments, stream.windows):
            if key in segments:
                segments[key] = Segments.of((*segments[key].lengths, missing))
        for name in stream.tensors:
            if name in tensors:
                zeros = tensors[name].new_zeros(missing, *tensors[name].shape[1:])
                tensors[name] = torch.cat([tensors[name], zeros])
    total = max(length, split.minimum)
    by_rank = [indices(split.ranges(total, rank)) for rank in range(split.ranks)]
    _note_order(tensors, segments, encoder.cp_key, by_rank, total)
    tensors[encoder.cp_key] = tensors[encoder.cp_key][:length]
    _keep(tensors, stream, split.ranges(total, position))


def assign_sequences(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Assign sequences to ranks: the longest first, each to the rank with the least work so far."""
    assigned: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for number in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        least = loads.index(min(loads))
        assigned[least].append(number)
        loads[least] += lengths[number]
    return [sorted(numbers) for numbers in assigned]


def take(tensor: Tensor, ranges: Sequence[Range], dim: int) -> Tensor:
    """Return the elements in these ranges as a copy: a view would keep the full tensor in memory."""
    return torch.cat([tensor.narrow(dim, start, end - start) for start, end in ranges], dim)


def indices(ranges: Sequence[Range]) -> Tensor:
    return torch.cat([torch.arange(start, end) for start, end in ranges]) if ranges else torch.empty(0).long()


def local_positions(positions: Tensor, ranges: Sequence[Range]) -> tuple[Tensor, Tensor]:
    """Select the positions inside of `ranges`.

    Return them as indices into the concatenated ranges, and the indices of the selected entries of `positions`.
    """
    local, which, before = [], [], 0
    for start, end in ranges:
        inside = ((positions >= start) & (positions < end)).nonzero().flatten()
        local.append(positions[inside] - start + before)
        which.append(inside)
        before += end - start
    return torch.cat(local), torch.cat(which)


def gathered_order(by_rank: Sequence[Tensor], length: int) -> Tensor:
    """Return where each element of a sequence is after an all-gather, which pads every rank's part to the longest.

    `by_rank`: indices of the elements of each rank. `length`: number of elements of the sequence.
    """
    longest = max((len(elements) for elements in by_rank), default=0)
    order = torch.zeros(length, dtype=torch.int64)
    for rank, elements in enumerate(by_rank):
        order[elements] = rank * longest + torch.arange(len(elements))
    return order


def _note_order(
    tensors: dict[str, Tensor], segments: dict[str, Segments], key: str, by_rank: Sequence[Tensor], length: int
) -> None:
    """Store under `key` the order of the all-gathered outputs, and the number of outputs of each rank."""
    tensors[key] = gathered_order(by_rank, length)
    segments[key] = Segments.of([len(positions) for positions in by_rank])


def _keep(tensors: dict[str, Tensor], stream: Stream, ranges: Sequence[Range]) -> None:
    for name in stream.tensors:
        if name in tensors:
            tensors[name] = take(tensors[name], ranges, stream.dim)


def _inside(lengths: Sequence[int], ranges: Sequence[Range]) -> list[int]:
    """Return the lengths of the segments inside of `ranges`, each of which consists of whole segments."""
    ends = list(itertools.accumulate(lengths, initial=0))
    starts = {start: number for number, start in enumerate(ends[:-1])}
    inner: list[int] = []
    for start, end in ranges:
        number = starts[start]
        while number < len(lengths) and ends[number] < end:
            inner.append(lengths[number])
            number += 1
    return inner


def lengths_inside(lengths: Sequence[int], ranges: Sequence[Range]) -> list[int]:
    """Return for each segment how many of its elements are inside of these ordered ranges."""
    ends = list(itertools.accumulate(lengths, initial=0))
    return [
        sum(max(0, min(last, end) - max(first, start)) for first, last in ranges)
        for start, end in itertools.pairwise(ends)
    ]


class RankDataset(RowSource):
    """Wrap a `RowSource` and return this rank's part of each batch. It runs on the host, in the loader's processes.

    Of the ranks that read the same rows, one reports sample ids and counts; the others have no ids,
    and counts of 0.
    """

    def __init__(
        self,
        source: RowSource,
        axes: Axes,
        rank: int,
        *,
        reports: bool = True,
        sharding: BatchSharding | None = None,
        flops: Callable[[Batch], float] | None = None,
    ) -> None:
        self.source = source
        self.reports = reports
        self.sharding = sharding
        self.flops = flops
        self.position = axes.position(rank, CONTEXT)
        encoders = () if sharding is None else sharding.encoders
        self.dp_positions = {encoder.name: axes.position(rank, encoder.dp_view) for encoder in encoders}
        source.check_ranks(axes.position(rank, DATA), axes.size(DATA))

    @property
    def bad_samples(self) -> Sequence[BadSample]:
        return self.source.bad_samples

    @property
    def bad_count(self) -> int:
        return self.source.bad_count

    @property
    def identity(self) -> str:
        return self.source.identity

    def __len__(self) -> int:
        return len(self.source)

    @property
    def rows_per_step(self) -> int | None:
        return self.source.rows_per_step

    @property
    def sequential(self) -> bool:
        return self.source.sequential

    @property
    def decodes_media(self) -> bool:
        return self.source.decodes_media

    def work(self, rows: Sequence[int]) -> Sequence[float] | None:
        """Return the cost of each full row: costs of sharded rows would differ between ranks, and so would batches."""
        return self.source.work(rows)

    def without(self, samples: Mapping[str, str]) -> RankDataset | None:
        source = self.source.without(samples)
        if source is None:
            return None
        dataset = copy.copy(self)
        dataset.source = source
        return dataset

    def batch(self, rows: Sequence[int]) -> Batch:
        return self._of_rank(self.source.batch(rows))

    def guarded(self, rows: Sequence[int], lost: Mapping[int, str], note: Callable[[int], None]) -> Batch:
        return self._of_rank(self.source.guarded(rows, lost, note))

    def _of_rank(self, batch: Batch) -> Batch:
        if not self.reports:
            batch = replace(batch, sample_ids=(), rows=(), problems=(), counts=dict.fromkeys(batch.counts, 0))
        elif self.flops is not None:
            batch = replace(batch, flops=self.flops(batch))
        if self.sharding is None:
            return batch
        return shard_batch(batch, self.sharding, self.position, self.dp_positions)
