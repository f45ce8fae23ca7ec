"""Tensors in several parts, which are written and compared without being joined.

Most of what one form of weights makes of another is rows in another order: gate and up in one tensor, queries, keys and
values by head. Such a tensor is a list of views, and no byte of it is copied before it is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Bytes = NDArray[np.uint8]
_CHUNK = 1 << 20  # bytes at a time: what is read, summed and written one after the other stays in a processor's cache


@dataclass(frozen=True)
class TensorRows:
    """Hold a tensor as parts along its first dimension, each a view of another tensor."""

    parts: tuple[Tensor, ...]

    @staticmethod
    def of(tensor: Tensor) -> TensorRows:
        return TensorRows((tensor,))

    @staticmethod
    def joined(several: Iterable[TensorRows]) -> TensorRows:
        return TensorRows(tuple(part for rows in several for part in rows.parts))

    @property
    def dtype(self) -> torch.dtype | None:
        """The type of all parts; None where they differ."""
        return self.parts[0].dtype if len({part.dtype for part in self.parts}) == 1 else None

    @property
    def shape(self) -> tuple[int, ...]:
        first = tuple(self.parts[0].shape)
        return first if len(self.parts) == 1 else (sum(part.shape[0] for part in self.parts), *first[1:])

    def whole(self) -> Tensor:
        """Return one tensor; a single part is not copied."""
        return self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts)

    def rows(self, start: int, count: int) -> TensorRows:
        """Return some of the rows."""
        found, at = list[Tensor](), 0
        for part in self.parts:
            low, high = max(start - at, 0), min(start + count - at, part.shape[0])
            if low < high:
                found.append(part[low:high])
            at += part.shape[0]
        return TensorRows(tuple(found) or (self.parts[0][:0],))

    def narrow(self, dim: int, start: int, count: int) -> TensorRows:
        """Return a range of another dimension than the first."""
        assert dim > 0
        return TensorRows(tuple(part.narrow(dim, start, count) for part in self.parts))

    def chunks(self) -> Iterator[Bytes]:
        """Return the bytes, some at a time. Parts that do not lie in order are copied, as little as that."""
        for part in self.parts:
            step = max(1, _CHUNK // max(1, prod(part.shape[1:]) * part.itemsize))
            for some in [part] if part.is_contiguous() else part.split(step):
                data = _bytes(some)
                yield from (data[at : at + _CHUNK] for at in range(0, len(data), _CHUNK))

    def same_bits(self, other: Tensor) -> bool:
        """Return whether a tensor has the same type, shape and bits: one that is not a number equals itself here."""
        if self.dtype != other.dtype or self.shape != tuple(other.shape):
            return False
        there, at = _bytes(other), 0
        for chunk in self.chunks():
            if not _same_bytes(chunk, there[at : at + len(chunk)]):
                return False
            at += len(chunk)
        return True


def _bytes(tensor: Tensor) -> Bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()


def _same_bytes(one: Bytes, other: Bytes) -> bool:
    wide = np.int64 if len(one) % 8 == 0 else np.uint8
    return np.array_equal(one.view(wide), other.view(wide))
