"""Tensors that are stored in several parts, in one file or more."""

from __future__ import annotations

import functools
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from tessera.checkpoint.files import CODES, open_safetensors, read_box, stored_shape
from tessera.errors import TesseraError

MOST_CELLS = 10_000_000


@dataclass(frozen=True)
class TensorPart:
    """Hold the place of a part of a tensor: in the tensor, and the file it is in."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path


P = TypeVar("P", bound=TensorPart)


class TensorInParts(ABC, Generic[P]):
    """Read a tensor that is stored in one file or several."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[P, ...]

    @abstractmethod
    def open_part(self, part: P) -> Callable[[Sequence[int], Sequence[int]], Tensor]:
        """Raise unless a part is in its file as described; return a function that reads a box of it."""

    def read(self, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> Tensor:
        """Return the tensor, or a box of it, in memory. Parts outside of the box are not read."""
        first = tuple(offsets or (0,) * len(self.shape))
        wanted = self.shape if sizes is None else tuple(sizes)
        boxes = []
        for part in self.parts:
            low = list(map(max, first, part.offsets))
            high = list(map(min, map(operator.add, first, wanted), map(operator.add, part.offsets, part.sizes)))
            if all(a < b for a, b in zip(low, high, strict=True)):
                there, here = (list(map(operator.sub, low, origin)) for origin in (part.offsets, first))
                boxes.append((self.open_part(part), there, here, list(map(operator.sub, high, low))))
        if len(boxes) == 1:
            read, there, _, size = boxes[0]
            return read(there, size)
        # Only now: a folder may claim any shape, and its files were found to hold all of it.
        tensor = torch.empty(wanted, dtype=self.dtype)
        for read, there, here, size in boxes:
            tensor[tuple(slice(at, at + count) for at, count in zip(here, size, strict=True))] = read(there, size)
        return tensor


@dataclass(frozen=True)
class KeyedPart(TensorPart):
    """Hold the place of a part of a tensor, and its key in a safetensors file."""

    key: str


@dataclass(frozen=True)
class SplitTensor(TensorInParts[KeyedPart]):
    """Describe a tensor that is stored in one safetensors file or several."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[KeyedPart, ...]

    def open_part(self, part: KeyedPart) -> Callable[[Sequence[int], Sequence[int]], Tensor]:
        with open_safetensors(part.file) as file:
            if stored_shape(file, part.key) != part.sizes or file.get_slice(part.key).get_dtype() != CODES[self.dtype]:
                raise TesseraError(
                    f"{part.key} in it is not as large, or of the type, as is said",
                    where=str(part.file),
                    code="checkpoint.part-differs",
                )
        return functools.partial(_read_part, part)


def _read_part(part: KeyedPart, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    with open_safetensors(part.file) as file:
        return read_box(file, part.key, offsets, sizes)


def check_cover(name: str, shape: tuple[int, ...], chunks: list[Any], where: str) -> None:
    """Refuse parts that leave a hole, overlap or reach beyond the tensor."""
    inside = all(
        len(offsets) == len(sizes) == len(shape)
        and all(offset + size <= total for offset, size, total in zip(offsets, sizes, shape, strict=True))
        for offsets, sizes in chunks
    )
    # Also of empty parts: a list of a million of them could serve as that of a thousand tensors.
    distinct = len({str(offsets) for offsets, _ in chunks}) == len(chunks)
    if (
        not inside
        or not distinct
        or sum(math.prod(sizes) for _, sizes in chunks) != math.prod(shape)
        or _overlap(chunks)
    ):
        raise TesseraError(
            f"the parts of {name!r} do not cover the tensor {shape}", where=where, code="checkpoint.parts-incomplete"
        )


def _overlap(chunks: list[Any]) -> bool:
    """Return whether two parts have an element in common, or are too many to compare."""
    chunks = [chunk for chunk in chunks if 0 not in chunk[1]]
    if len(chunks) < 2:
        return False
    # A grid with a line at every edge of a part: each part is a block of its cells.
    ends = [(offsets, tuple(map(operator.add, offsets, sizes))) for offsets, sizes in chunks]
    lines = [sorted(set(edges)) for edges in zip(*(corner for both in ends for corner in both), strict=True)]
    places = [{edge: place for place, edge in enumerate(edges)} for edges in lines]
    if math.prod(map(len, lines)) > MOST_CELLS:
        return True
    taken = torch.zeros([len(edges) for edges in lines], dtype=torch.bool)
    for first, last in ends:
        block = taken[tuple(slice(place[a], place[b]) for place, a, b in zip(places, first, last, strict=True))]
        if block.any():
            return True
        block.fill_(True)
    return False
