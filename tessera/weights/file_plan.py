"""Plan the positions of tensors in files before they are written, and memory-map stored tensors.

A plan contains all bytes of the files except those of tensors. So several threads can write tensors in any order
(`checkpoint.writer`).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from tessera.errors import TesseraError
from tessera.weights.rows import TensorRows


@dataclass(frozen=True)
class PlannedTensor:
    """Hold the dtype and shape of a tensor that will be written."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor) -> PlannedTensor:
        return PlannedTensor(tensor.dtype, tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class FilePlan:
    """Describe a file: its size, and all bytes that are not tensors, with their positions."""

    size: int
    pieces: tuple[tuple[int, bytes], ...]

    @staticmethod
    def of_bytes(content: bytes) -> FilePlan:
        """Return the plan of a file without tensors."""
        return FilePlan(len(content), ((0, content),))


@dataclass(frozen=True)
class Place:
    """Hold the file and the byte position to which a slice of a tensor will be written."""

    file: str
    """Path below the folder."""
    offset: int
    slice: int = 0
    """Index into the slices that `FolderPlan.divide` returns."""
    checksums: tuple[int, ...] = ()
    """Positions in the file at which the CRC-32 of the slice is written."""


def _whole(name: str, tensor: TensorRows) -> Sequence[TensorRows]:
    return (tensor,)


@dataclass(frozen=True)
class FolderPlan:
    """Describe the files of a folder, and the positions of each tensor's slices in them."""

    files: Mapping[str, FilePlan]
    places: Mapping[str, Sequence[Place]]
    divide: Callable[[str, TensorRows], Sequence[TensorRows]] = field(default=_whole)

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self.files.values())


def map_elements(path: Path, offset: int, count: int, dtype: torch.dtype, *, all_soon: bool = False) -> Tensor:
    """Return elements of a file as a flat tensor over a memory map.

    Pages are read on access, and freed with the tensor. Elements at an offset that is no multiple of their size are
    copied. `all_soon`: all elements will be used, so the system may read ahead.
    """
    if not count:
        return torch.empty(0, dtype=dtype)
    length, before = count * dtype.itemsize, offset % mmap.ALLOCATIONGRANULARITY
    with path.open("rb") as opened:
        if offset + length > os.fstat(opened.fileno()).st_size:
            raise TesseraError(
                "the file has become shorter since it was opened", where=str(path), code="weights.source-changed"
            )
        # Use ACCESS_COPY (private, copy on write), because torch.frombuffer warns about read-only memory.
        mapped = mmap.mmap(opened.fileno(), before + length, offset=offset - before, access=mmap.ACCESS_COPY)
    if all_soon:
        mapped.madvise(mmap.MADV_WILLNEED)
    if offset % dtype.itemsize:
        return torch.frombuffer(bytearray(mapped[before:]), dtype=dtype)
    return torch.frombuffer(mapped, dtype=dtype, count=count, offset=before)
