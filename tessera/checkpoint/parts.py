"""Read tensors that are stored in parts, in one file or more. A part is a box: a rectangular slice of the tensor."""

from __future__ import annotations

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

MOST_PARTS = 10_000  # limit per tensor; one part per rank is usual


@dataclass(frozen=True)
class TensorPart:
    """Locate a stored box of a tensor: its offsets and sizes in the tensor, and its file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path


P = TypeVar("P", bound=TensorPart)


class TensorInParts(ABC, Generic[P]):
    """Read a tensor that is stored as one box or several."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[P, ...]

    @abstractmethod
    def open_part(self, part: P) -> Callable[[Sequence[int], Sequence[int]], Tensor]:
        """Check that the file contains this part; return a function that reads a box of the part."""

    def read(self, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> Tensor:
        """Return the tensor, or a box (offsets and sizes) of it. Parts outside the box are not read."""
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
        # Allocate after the checks of `open_part`: metadata could claim any shape.
        tensor = torch.empty(wanted, dtype=self.dtype)
        for read, there, here, size in boxes:
            tensor[tuple(slice(at, at + count) for at, count in zip(here, size, strict=True))] = read(there, size)
        return tensor


@dataclass(frozen=True)
class KeyedPart(TensorPart):
    """Locate a stored box of a tensor by its key in a safetensors file."""

    key: str


@dataclass(frozen=True)
class SplitTensor(TensorInParts[KeyedPart]):
    """Read a tensor from boxes in safetensors files."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[KeyedPart, ...]

    def open_part(self, part: KeyedPart) -> Callable[[Sequence[int], Sequence[int]], Tensor]:
        with open_safetensors(part.file) as file:
            if stored_shape(file, part.key) != part.sizes or file.get_slice(part.key).get_dtype() != CODES[self.dtype]:
                raise TesseraError(
                    f"{part.key} has another shape or dtype in this file than in tensors.json of the checkpoint",
                    where=str(part.file),
                    code="checkpoint.part-differs",
                )

        def read(offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
            with open_safetensors(part.file) as file:
                return read_box(file, part.key, offsets, sizes)

        return read


def check_cover(name: str, shape: tuple[int, ...], chunks: list[Any], where: str) -> None:
    """Raise unless the parts cover the tensor exactly: without gaps, without overlap and inside its shape."""
    inside = all(
        len(offsets) == len(sizes) == len(shape)
        and min((*offsets, *sizes), default=0) >= 0
        and all(offset + size <= total for offset, size, total in zip(offsets, sizes, shape, strict=True))
        for offsets, sizes in chunks
    )
    # Refuse duplicate offsets, even of empty parts: a list of a million empty parts would slow down every reader.
    distinct = len({str(offsets) for offsets, _ in chunks}) == len(chunks)
    complete = sum(math.prod(sizes) for _, sizes in chunks) == math.prod(shape)
    if not inside or not distinct or not complete or _overlap([chunk for chunk in chunks if 0 not in chunk[1]]):
        raise TesseraError(
            f"the parts of {name!r} do not cover its shape {shape}", where=where, code="checkpoint.parts-incomplete"
        )


def _overlap(chunks: list[Any]) -> bool:
    """Return whether two parts overlap. With more than MOST_PARTS parts, return True without comparing them."""
    if len(chunks) < 2 or len(chunks) > MOST_PARTS:
        return len(chunks) > MOST_PARTS
    starts = torch.tensor([offsets for offsets, _ in chunks])
    ends = starts + torch.tensor([sizes for _, sizes in chunks])
    split = (starts != starts[0]).any(dim=0).nonzero().flatten().tolist()
    if len(split) == 1:  # split along one dimension, as is usual: compare neighbours
        order = starts[:, split[0]].argsort()
        return bool((starts[order, split[0]][1:] < ends[order, split[0]][:-1]).any())
    overlaps = (((starts < end) & (start < ends)).all(dim=1) for start, end in zip(starts, ends, strict=True))
    return any(int(parts.sum()) > 1 for parts in overlaps)  # every part overlaps itself
