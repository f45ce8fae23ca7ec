"""Hold a tensor as a list of row blocks, which are written and compared without concatenating them.

Formats of weights mostly differ in the order of rows: fused gate and up, or queries, keys and values grouped by head.
Row blocks are views of the source, so no byte is copied before the write.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tessera.runtime.libc import same_bytes

Bytes = NDArray[np.uint8]
_CHUNK = 256 << 10  # bytes per chunk: small enough for the CPU cache


@dataclass(frozen=True)
class TensorRows:
    """Hold a tensor as blocks along its first dimension."""

    parts: tuple[Tensor, ...]

    @staticmethod
    def of(tensor: Tensor) -> TensorRows:
        return TensorRows((tensor,))

    @staticmethod
    def joined(several: Iterable[TensorRows]) -> TensorRows:
        return TensorRows(tuple(part for rows in several for part in rows.parts))

    @property
    def dtype(self) -> torch.dtype | None:
        """Return the dtype of all blocks; None if they differ."""
        return self.parts[0].dtype if len({part.dtype for part in self.parts}) == 1 else None

    @property
    def shape(self) -> tuple[int, ...]:
        first = tuple(self.parts[0].shape)
        return first if len(self.parts) == 1 else (sum(part.shape[0] for part in self.parts), *first[1:])

    def whole(self) -> Tensor:
        """Return the blocks as one tensor. A single block is not copied."""
        return self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts)

    def rows(self, start: int, count: int) -> TensorRows:
        """Return `count` rows from `start`, as views."""
        parts, at = list[Tensor](), 0
        for part in self.parts:
            low, high = max(start - at, 0), min(start + count - at, part.shape[0])
            if low < high:
                parts.append(part[low:high])
            at += part.shape[0]
        return TensorRows(tuple(parts) or (self.parts[0][:0],))

    def narrow(self, dim: int, start: int, count: int) -> TensorRows:
        """Return a range of dimension `dim`, which is not the first."""
        assert dim > 0
        return TensorRows(tuple(part.narrow(dim, start, count) for part in self.parts))

    def chunks(self) -> Iterator[Bytes]:
        """Yield all bytes in chunks. Blocks that are not contiguous are copied one chunk at a time."""
        for part in self.parts:
            step = max(1, _CHUNK // max(1, prod(part.shape[1:]) * part.dtype.itemsize))
            contiguous = part.is_contiguous() or not part.dim()
            for some in (part,) if contiguous else part.split(step):
                data = _bytes(some)
                yield from (data[at : at + _CHUNK] for at in range(0, len(data), _CHUNK))

    def same_bits(self, other: Tensor) -> bool:
        """Return whether a tensor has the same dtype, shape and bits. Equal NaN bits count as equal."""
        if self.dtype != other.dtype or self.shape != tuple(other.shape):
            return False
        there, at = _bytes(other), 0
        for chunk in self.chunks():
            if not same_bytes(chunk, there[at : at + len(chunk)]):
                return False
            at += len(chunk)
        return True


def _bytes(tensor: Tensor) -> Bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
