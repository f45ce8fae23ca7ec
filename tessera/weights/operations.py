"""The operations of weight maps: how one native tensor is made from foreign ones, and how it goes back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from tessera.weights.rows import TensorRows

Box = tuple[int, tuple[int, ...], tuple[int, ...]]  # index of a foreign tensor, offsets and sizes in it
Shapes = Sequence[tuple[int, ...]]


class Operation(Protocol):
    """Make one native tensor from foreign ones, and those from it. One that is `ByBox`, too, can make a part of it."""

    def to_native(self, foreign: Sequence[Tensor]) -> Tensor: ...

    def to_foreign(self, native: Tensor) -> list[Tensor]: ...


@runtime_checkable
class ByBox(Protocol):
    """Make a box of the native tensor (offsets and sizes along every dimension) from boxes of foreign ones, so that a
    rank reads the bytes of its own shard alone, whatever dimensions are sharded."""

    def boxes(self, offsets: Sequence[int], sizes: Sequence[int], foreign: Shapes) -> list[Box]:
        """Return the foreign boxes of a native box that is not empty. `foreign`: the full shapes."""
        ...

    def join_boxes(
        self, boxes: Sequence[Tensor], offsets: Sequence[int], sizes: Sequence[int], foreign: Shapes
    ) -> Tensor:
        """Return the native box at `offsets` of `sizes` from the foreign boxes."""
        ...


def shape_of(op: Operation, foreign: Shapes) -> tuple[int, ...]:
    """Return the native shape that foreign shapes give, without any data."""
    return tuple(op.to_native([torch.empty(shape, device="meta") for shape in foreign]).shape)


@dataclass(frozen=True)
class Identity:
    def boxes(self, offsets: Sequence[int], sizes: Sequence[int], foreign: Shapes) -> list[Box]:
        return [(0, tuple(offsets), tuple(sizes))]

    def join_boxes(self, boxes: Sequence[Tensor], *_: Any) -> Tensor:
        return boxes[0]

    def to_native(self, foreign: Sequence[Tensor]) -> Tensor:
        (tensor,) = foreign
        return tensor

    def to_foreign(self, native: Tensor) -> list[Tensor]:
        return [native]


@dataclass(frozen=True)
class Reshape:
    """Keep the elements and change the shape, such as that of a convolution which is a linear layer over patches."""

    native: tuple[int, ...]
    foreign: tuple[int, ...]

    def to_native(self, foreign: Sequence[Tensor]) -> Tensor:
        (tensor,) = foreign
        return tensor.reshape(self.native)

    def to_foreign(self, native: Tensor) -> list[Tensor]:
        return [native.reshape(self.foreign)]


class RowOrder(ABC):
    """Read boxes for an operation that only moves rows: moving their numbers shows where rows come from."""

    @abstractmethod
    def to_native(self, foreign: Sequence[Tensor]) -> Tensor: ...

    def boxes(self, offsets: Sequence[int], sizes: Sequence[int], foreign: Shapes) -> list[Box]:
        rows = self._rows(offsets, sizes, foreign).sort().values
        ends = torch.tensor([shape[0] for shape in foreign]).cumsum(0)
        number = torch.bucketize(rows, ends, right=True)
        breaks = 1 + ((rows.diff() != 1) | (number.diff() != 0)).nonzero().flatten()
        boxes: list[Box] = []
        for first, last in pairwise([0, *breaks.tolist(), len(rows)]):
            source = int(number[first])
            start = int(rows[first]) - int(ends[source]) + foreign[source][0]
            boxes.append((source, (start, *offsets[1:]), (last - first, *sizes[1:])))
        return boxes

    def join_boxes(
        self, boxes: Sequence[Tensor], offsets: Sequence[int], sizes: Sequence[int], foreign: Shapes
    ) -> Tensor:
        order = self._rows(offsets, sizes, foreign).argsort()  # boxes come in the order of the foreign rows
        return torch.cat(list(boxes))[order.argsort()]

    def _rows(self, offsets: Sequence[int], sizes: Sequence[int], foreign: Shapes) -> Tensor:
        counts = [shape[0] for shape in foreign]
        numbers = self.to_native(torch.arange(sum(counts)).split(counts))
        return numbers[offsets[0] : offsets[0] + sizes[0]]


@dataclass(frozen=True)
class GroupByHead(RowOrder):
    """Order the output rows of a fused projection (queries, keys, values: `kinds`) by head. Foreign rows are
    ordered by kind, each kind in a tensor of its own if `separate`."""

    heads: int
    kinds: int = 3
    separate: bool = False

    def to_native(self, foreign: Sequence[Tensor]) -> Tensor:
        return _regroup(torch.cat(list(foreign)) if self.separate else foreign[0], self.kinds, self.heads)

    def to_foreign(self, native: Tensor) -> list[Tensor]:
        joined = _regroup(native, self.heads, self.kinds)
        return [kind.contiguous() for kind in joined.chunk(self.kinds)] if self.separate else [joined]


def _regroup(tensor: Tensor, outer: int, inner: int) -> Tensor:
    grouped = tensor.reshape(outer, inner, -1, *tensor.shape[1:])
    return grouped.transpose(0, 1).reshape(tensor.shape)


@dataclass(frozen=True)
class SwappedHalves(RowOrder):
    """Swap the two halves of the rows: shift and scale of a modulation, which checkpoints have in both orders."""

    def to_native(self, foreign: Sequence[Tensor]) -> Tensor:
        return torch.cat(foreign[0].chunk(2)[::-1])

    def to_foreign(self, native: Tensor) -> list[Tensor]:
        return [torch.cat(native.chunk(2)[::-1])]


@dataclass(frozen=True)
class ColumnsByHead:
    """Order the input columns of a layer by head, those of every kind for the first head, then for the second, and so
    on. Foreign columns are ordered by kind; `sizes`: columns of each."""

    heads: int
    sizes: tuple[int, ...]

    def to_native(self, foreign: Sequence[Tensor]) -> Tensor:
        kinds = foreign[0].split(list(self.sizes), dim=1)
        return torch.cat([kind.unflatten(1, (self.heads, -1)) for kind in kinds], dim=2).flatten(1)

    def to_foreign(self, native: Tensor) -> list[Tensor]:
        kinds = native.unflatten(1, (self.heads, -1)).split([size // self.heads for size in self.sizes], dim=2)
        return [torch.cat([kind.flatten(1) for kind in kinds], dim=1)]


@dataclass(frozen=True)
class InterleavedToHalfRope(RowOrder):
    """Order the rows of a projection for rotary embeddings that rotate the first half against the second, as native
    modules do. Foreign modules rotate neighbouring pairs. Only the first `rotary_dim` of each head are rotated."""

    head_dim: int
    rotary_dim: int

    def to_native(self, foreign: Sequence[Tensor]) -> Tensor:
        (tensor,) = foreign
        return self._reorder(tensor, self.rotary_dim // 2, 2)

    def to_foreign(self, native: Tensor) -> list[Tensor]:
        return [self._reorder(native, 2, self.rotary_dim // 2)]

    def _reorder(self, tensor: Tensor, outer: int, inner: int) -> Tensor:
        heads = tensor.reshape(-1, self.head_dim, *tensor.shape[1:])
        rotated = heads[:, : self.rotary_dim].reshape(-1, outer, inner, *tensor.shape[1:]).transpose(1, 2)
        rotated = rotated.reshape(-1, self.rotary_dim, *tensor.shape[1:])
        return torch.cat([rotated, heads[:, self.rotary_dim :]], dim=1).reshape(tensor.shape)


@dataclass(frozen=True)
class ConvToLinear:
    """Make a linear layer over the features of `side` x `side` patches, [out, side * side * channels], from a
    convolution over such blocks, [out, channels, side, side]."""

    side: int

    def to_native(self, foreign: Sequence[Tensor]) -> Tensor:
        (tensor,) = foreign
        return tensor.permute(0, 2, 3, 1).flatten(1).contiguous()

    def to_foreign(self, native: Tensor) -> list[Tensor]:
        blocks = native.reshape(native.shape[0], self.side, self.side, -1)
        return [blocks.permute(0, 3, 1, 2).contiguous()]


@dataclass(frozen=True)
class Concat:
    """Join foreign tensors along `dim`; `sizes` are their lengths along it."""

    sizes: tuple[int, ...]
    dim: int = 0

    def boxes(self, offsets: Sequence[int], sizes: Sequence[int], foreign: Shapes) -> list[Box]:
        boxes: list[Box] = []
        at, first, last = 0, offsets[self.dim], offsets[self.dim] + sizes[self.dim]
        for number, shape in enumerate(foreign):
            low, high = max(first, at), min(last, at + shape[self.dim])
            if low < high:
                boxes.append((number, _with(offsets, self.dim, low - at), _with(sizes, self.dim, high - low)))
            at += shape[self.dim]
        return boxes

    def join_boxes(self, boxes: Sequence[Tensor], *_: Any) -> Tensor:
        return torch.cat(list(boxes), dim=self.dim)

    def to_native(self, foreign: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(foreign), dim=self.dim)

    def to_foreign(self, native: Tensor) -> list[Tensor]:
        return [part.contiguous() for part in native.split(list(self.sizes), dim=self.dim)]


@dataclass(frozen=True)
class Stack:
    """Stack foreign tensors along a new first dimension: the weights of experts."""

    def boxes(self, offsets: Sequence[int], sizes: Sequence[int], foreign: Shapes) -> list[Box]:
        return [(n, tuple(offsets[1:]), tuple(sizes[1:])) for n in range(offsets[0], offsets[0] + sizes[0])]

    def join_boxes(self, boxes: Sequence[Tensor], *_: Any) -> Tensor:
        return torch.stack(list(boxes))

    def to_native(self, foreign: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(foreign))

    def to_foreign(self, native: Tensor) -> list[Tensor]:
        return [part.contiguous() for part in native.unbind(0)]


@dataclass(frozen=True)
class TransposeIfNeeded:
    """Swap the last two dimensions unless the foreign tensor is [..., rows, columns] already, as the native one is.

    It is written with both swapped unless `as_native`. A square is not: its shape would not tell a reader.
    """

    rows: int
    columns: int
    as_native: bool = False

    def boxes(self, offsets: Sequence[int], sizes: Sequence[int], foreign: Shapes) -> list[Box]:
        if self._is_native(foreign[0]):
            return [(0, tuple(offsets), tuple(sizes))]
        return [(0, _swapped(offsets), _swapped(sizes))]

    def join_boxes(
        self, boxes: Sequence[Tensor], offsets: Sequence[int], sizes: Sequence[int], foreign: Shapes
    ) -> Tensor:
        return boxes[0] if self._is_native(foreign[0]) else boxes[0].transpose(-1, -2)

    def _is_native(self, foreign: Sequence[int]) -> bool:
        return tuple(foreign[-2:]) == (self.rows, self.columns)

    def to_native(self, foreign: Sequence[Tensor]) -> Tensor:
        (tensor,) = foreign
        if self._is_native(tensor.shape):
            return tensor
        return tensor.transpose(-1, -2).contiguous()

    def to_foreign(self, native: Tensor) -> list[Tensor]:
        return [native if self.as_native or self.rows == self.columns else native.transpose(-1, -2).contiguous()]


@dataclass(frozen=True)
class StoredTwice:
    """Store one native tensor under two foreign names: a table, and the head that is tied to it."""

    def to_native(self, foreign: Sequence[Tensor]) -> Tensor:
        return foreign[0]

    def to_foreign(self, native: Tensor) -> list[Tensor]:
        return [native, native]


@dataclass(frozen=True)
class TensorChunk:
    """Take chunk `number` of `of` equal ones along `dim` of a foreign tensor, after `op`. Each other chunk is another
    native tensor, with a rule of its own; `WeightMap.to_foreign` joins those that `WeightMap.group_of` names."""

    number: int
    of: int
    dim: int = 0
    op: Operation = field(default_factory=Identity)

    def boxes(self, offsets: Sequence[int], sizes: Sequence[int], foreign: Shapes) -> list[Box]:
        assert isinstance(self.op, ByBox), f"a chunk of {self.op} is read in full"
        return self.op.boxes(self._shifted(offsets, foreign), sizes, foreign)

    def join_boxes(
        self, boxes: Sequence[Tensor], offsets: Sequence[int], sizes: Sequence[int], foreign: Shapes
    ) -> Tensor:
        assert isinstance(self.op, ByBox)
        return self.op.join_boxes(boxes, self._shifted(offsets, foreign), sizes, foreign)

    def _shifted(self, offsets: Sequence[int], foreign: Shapes) -> tuple[int, ...]:
        shape = shape_of(self.op, foreign)
        return _with(offsets, self.dim, offsets[self.dim] + self.number * -(-shape[self.dim] // self.of))

    def to_native(self, foreign: Sequence[Tensor]) -> Tensor:
        return self.op.to_native(foreign).chunk(self.of, dim=self.dim)[self.number].contiguous()

    def to_foreign(self, native: Tensor) -> list[Tensor]:
        raise AssertionError("a chunk alone makes no foreign tensor: WeightMap.to_foreign joins all of them")

    def join_chunks(self, chunks: Sequence[Tensor]) -> list[TensorRows]:
        return self.join_rows([TensorRows.of(chunk) for chunk in chunks])

    def join_rows(self, chunks: Sequence[TensorRows]) -> list[TensorRows]:
        if self.dim == 0 and isinstance(self.op, Identity):
            return [TensorRows.joined(chunks)]
        return [
            TensorRows.of(tensor)
            for tensor in self.op.to_foreign(torch.cat([chunk.whole() for chunk in chunks], dim=self.dim))
        ]

    def chunk_of(self, whole: TensorRows) -> TensorRows | None:
        """Return the native rows of a foreign tensor without copying any; None where that cannot be."""
        if self.dim or not isinstance(self.op, Identity):
            return None
        size = -(-whole.shape[0] // self.of)
        start = min(self.number * size, whole.shape[0])
        return whole.rows(start, min(size, whole.shape[0] - start))


@dataclass(frozen=True)
class GroupedRows(RowOrder, TensorChunk):
    """Take one of several kinds of rows (queries, keys, values) out of a foreign tensor that has them in groups: the
    rows of each kind for the first key-value head, then for the second, and so on. `rows`: of each kind in a group."""

    rows: tuple[int, ...] = ()

    def to_native(self, foreign: Sequence[Tensor]) -> Tensor:
        (tensor,) = foreign
        groups = tensor.reshape(-1, sum(self.rows), *tensor.shape[1:])
        kind: Tensor = groups.split(list(self.rows), dim=1)[self.number]
        return kind.reshape(-1, *tensor.shape[1:]).contiguous()

    def join_rows(self, chunks: Sequence[TensorRows]) -> list[TensorRows]:
        groups = range(chunks[0].shape[0] // self.rows[0])
        return [
            TensorRows.joined(
                chunk.rows(group * rows, rows)
                for group in groups
                for chunk, rows in zip(chunks, self.rows, strict=True)
            )
        ]

    def chunk_of(self, whole: TensorRows) -> TensorRows | None:
        each, before, rows = sum(self.rows), sum(self.rows[: self.number]), self.rows[self.number]
        return TensorRows.joined(whole.rows(start + before, rows) for start in range(0, whole.shape[0], each))


def native_rows(op: Operation, foreign: Sequence[TensorRows]) -> TensorRows:
    """Do as `op.to_native` does, and copy nothing where only the order of rows differs."""
    rows = None
    if isinstance(op, Identity | StoredTwice):
        rows = foreign[0]
    elif isinstance(op, Concat) and op.dim == 0:
        rows = TensorRows.joined(foreign)
    elif isinstance(op, TensorChunk):
        rows = op.chunk_of(foreign[0])
    return TensorRows.of(op.to_native([source.whole() for source in foreign])) if rows is None else rows


def foreign_rows(op: Operation, native: TensorRows) -> list[TensorRows]:
    """Do as `op.to_foreign` does, and copy nothing where only the order of rows differs."""
    if isinstance(op, Identity):
        return [native]
    if isinstance(op, StoredTwice):
        return [native, native]
    if isinstance(op, Concat) and op.dim == 0:
        starts = [sum(op.sizes[:number]) for number in range(len(op.sizes))]
        return [native.rows(start, size) for start, size in zip(starts, op.sizes, strict=True)]
    return [TensorRows.of(made) for made in op.to_foreign(native.whole())]


def can_read_boxes(op: Operation) -> bool:
    """Return whether an operation makes a box from boxes. A chunk does if the operation of its source does."""
    return can_read_boxes(op.op) if isinstance(op, TensorChunk) else isinstance(op, ByBox)


def _with(numbers: Sequence[int], dim: int, number: int) -> tuple[int, ...]:
    return (*numbers[:dim], number, *numbers[dim + 1 :])


def _swapped(numbers: Sequence[int]) -> tuple[int, ...]:
    return (*numbers[:-2], numbers[-1], numbers[-2])
