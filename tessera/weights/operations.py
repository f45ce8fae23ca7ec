"""Operations of weight maps: make a native tensor (of Tessera) from foreign tensors (of a folder), and the reverse."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from tessera.weights.rows import TensorRows

Box = tuple[int, tuple[int, ...], tuple[int, ...]]  # index of a foreign tensor, offsets, sizes
Shapes = Sequence[tuple[int, ...]]


class Operation(Protocol):
    """Make a native tensor from foreign tensors, and the reverse.

    Operations that can work on parts of tensors also derive from `ByBox`.
    """

    def to_native(self, foreign: Sequence[Tensor]) -> Tensor: ...

    def to_foreign(self, native: Tensor) -> list[Tensor]: ...


@runtime_checkable
class ByBox(Protocol):
    """Make a box (offsets and sizes) of a native tensor from foreign boxes, so that a rank reads only its shard."""

    def boxes(self, offsets: Sequence[int], sizes: Sequence[int], foreign: Shapes) -> list[Box]:
        """Return the foreign boxes that a native box needs. `foreign`: full shapes of the foreign tensors."""
        ...

    def join_boxes(
        self, boxes: Sequence[Tensor], offsets: Sequence[int], sizes: Sequence[int], foreign: Shapes
    ) -> Tensor:
        """Return the box at `offsets` with `sizes` of the native tensor. `boxes`: boxes of the foreign tensors."""
        ...


def shape_of(op: Operation, foreign: Shapes) -> tuple[int, ...]:
    """Return the shape of the native tensor that is made from foreign tensors of these shapes."""
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
    """Change the shape, for example from a convolution over patches to a linear layer."""

    native: tuple[int, ...]
    foreign: tuple[int, ...]

    def to_native(self, foreign: Sequence[Tensor]) -> Tensor:
        (tensor,) = foreign
        return tensor.reshape(self.native)

    def to_foreign(self, native: Tensor) -> list[Tensor]:
        return [native.reshape(self.foreign)]


class RowOrder(ABC):
    """Base class of operations that only reorder rows. Applied to row indices, they return the source of each row."""

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
        order = self._rows(offsets, sizes, foreign).argsort()  # the boxes are sorted by foreign row
        return torch.cat(list(boxes))[order.argsort()]

    def _rows(self, offsets: Sequence[int], sizes: Sequence[int], foreign: Shapes) -> Tensor:
        counts = [shape[0] for shape in foreign]
        numbers = self.to_native(torch.arange(sum(counts)).split(counts))
        return numbers[offsets[0] : offsets[0] + sizes[0]]


@dataclass(frozen=True)
class GroupByHead(RowOrder):
    """Group the output rows of a fused projection by head. In the foreign tensor they are grouped by kind.

    `kinds`: 3 for queries, keys and values. `separate`: each kind is a separate foreign tensor."""

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
    """Swap the two halves of the rows: some checkpoints store the shift of a modulation before the scale."""

    def to_native(self, foreign: Sequence[Tensor]) -> Tensor:
        return torch.cat(foreign[0].chunk(2)[::-1])

    def to_foreign(self, native: Tensor) -> list[Tensor]:
        return [torch.cat(native.chunk(2)[::-1])]


@dataclass(frozen=True)
class ColumnsByHead:
    """Group the input columns of a layer by head. In the foreign tensor they are grouped by kind.

    `sizes`: number of columns of each kind."""

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
    """Reorder rows for rotary embeddings: foreign modules rotate neighbouring pairs, native modules two halves.

    Only the first `rotary_dim` rows of each head are rotated."""

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
    """Turn a convolution over `side` x `side` patches into a linear layer over their features.

    Foreign shape: [out, channels, side, side]. Native shape: [out, side * side * channels]."""

    side: int

    def to_native(self, foreign: Sequence[Tensor]) -> Tensor:
        (tensor,) = foreign
        return tensor.permute(0, 2, 3, 1).flatten(1).contiguous()

    def to_foreign(self, native: Tensor) -> list[Tensor]:
        blocks = native.reshape(native.shape[0], self.side, self.side, -1)
        return [blocks.permute(0, 3, 1, 2).contiguous()]


@dataclass(frozen=True)
class Concat:
    """Concatenate foreign tensors along `dim`. `sizes`: their lengths along `dim`."""

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
    """Stack foreign tensors, such as weights of experts, along a new first dimension."""

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
    """Transpose the last two dimensions, unless the foreign tensor has the native shape [..., rows, columns].

    In the reverse direction the native tensor is always transposed, unless `as_native`. Square matrices are not
    transposed in either direction, because their shape does not show the layout.
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
    """Store a native tensor under two foreign names: an embedding and its tied head."""

    def to_native(self, foreign: Sequence[Tensor]) -> Tensor:
        return foreign[0]

    def to_foreign(self, native: Tensor) -> list[Tensor]:
        return [native, native]


@dataclass(frozen=True)
class TensorChunk:
    """Take chunk `number` of `of` equal chunks of a foreign tensor along `dim`, after applying `op` to it.

    The other chunks belong to other native tensors. `WeightMap.to_foreign` joins all chunks of a group."""

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
        """Return the native rows of a chunk as views of a foreign tensor; None if they must be copied."""
        if self.dim or not isinstance(self.op, Identity):
            return None
        size = -(-whole.shape[0] // self.of)
        start = min(self.number * size, whole.shape[0])
        return whole.rows(start, min(size, whole.shape[0] - start))


@dataclass(frozen=True)
class GroupedRows(RowOrder, TensorChunk):
    """Take the rows of one kind (queries, keys or values) from a foreign tensor that groups rows by key-value head.

    `rows`: number of rows of each kind in a group."""

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


@dataclass(frozen=True)
class TransposedMatrix(TensorChunk):
    """Take matrix `number` of a foreign tensor [of, columns, rows] of stacked matrices, transposed."""

    def boxes(self, offsets: Sequence[int], sizes: Sequence[int], foreign: Shapes) -> list[Box]:
        return [(0, (self.number, *_swapped(offsets)), (1, *_swapped(sizes)))]

    def join_boxes(
        self, boxes: Sequence[Tensor], offsets: Sequence[int], sizes: Sequence[int], foreign: Shapes
    ) -> Tensor:
        return boxes[0][0].T

    def to_native(self, foreign: Sequence[Tensor]) -> Tensor:
        return foreign[0][self.number].T.contiguous()

    def join_rows(self, chunks: Sequence[TensorRows]) -> list[TensorRows]:
        return [TensorRows.of(torch.stack([chunk.whole().T for chunk in chunks]))]

    def chunk_of(self, whole: TensorRows) -> TensorRows | None:
        return None


def native_rows(op: Operation, foreign: Sequence[TensorRows]) -> TensorRows:
    """Compute `op.to_native` for tensors in row blocks.

    The result is views if the operation is `Identity`, `StoredTwice`, `Concat` of rows or selects rows by `chunk_of`.
    """
    rows = None
    if isinstance(op, Identity | StoredTwice):
        rows = foreign[0]
    elif isinstance(op, Concat) and op.dim == 0:
        rows = TensorRows.joined(foreign)
    elif isinstance(op, TensorChunk):
        rows = op.chunk_of(foreign[0])
    return TensorRows.of(op.to_native([source.whole() for source in foreign])) if rows is None else rows


def foreign_rows(op: Operation, native: TensorRows) -> list[TensorRows]:
    """Compute `op.to_foreign` for a tensor in row blocks.

    The result is views if the operation is `Identity`, `StoredTwice` or `Concat` of rows.
    """
    if isinstance(op, Identity):
        return [native]
    if isinstance(op, StoredTwice):
        return [native, native]
    if isinstance(op, Concat) and op.dim == 0:
        starts = [sum(op.sizes[:number]) for number in range(len(op.sizes))]
        return [native.rows(start, size) for start, size in zip(starts, op.sizes, strict=True)]
    return [TensorRows.of(tensor) for tensor in op.to_foreign(native.whole())]


def can_read_boxes(op: Operation) -> bool:
    """Return whether an operation can make a part of the native tensor from parts of foreign tensors (`ByBox`).

    A `TensorChunk` can if its inner operation can.
    """
    return can_read_boxes(op.op) if isinstance(op, TensorChunk) else isinstance(op, ByBox)


def _with(numbers: Sequence[int], dim: int, number: int) -> tuple[int, ...]:
    return (*numbers[:dim], number, *numbers[dim + 1 :])


def _swapped(numbers: Sequence[int]) -> tuple[int, ...]:
    return (*numbers[:-2], numbers[-1], numbers[-2])
