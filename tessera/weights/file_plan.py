"""Positions of tensors in files: planned before any tensor is written, and mapped to be read.

A plan holds everything of the files but the bytes of tensors. So tensors can be written in any order, by several
threads, into files that readers can open from the beginning (`checkpoint.writer`).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from tessera.errors import TesseraError
from tessera.weights.rows import TensorRows


@dataclass(frozen=True)
class PlannedTensor:
    """Describe a tensor that will be written."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class FilePlan:
    """Describe a file: its size, and everything in it that is no tensor, by position."""

    size: int
    pieces: tuple[tuple[int, bytes], ...]

    @staticmethod
    def of_bytes(content: bytes) -> FilePlan:
        """Return the plan of a file without tensors."""
        return FilePlan(len(content), ((0, content),))


@dataclass(frozen=True)
class Place:
    """Locate the bytes of a slice of a tensor in a file that will be written."""

    file: str
    """Path below the folder."""
    offset: int
    slice: int = 0
    """Which of the slices that `FolderPlan.divide` returns."""
    checksums: tuple[int, ...] = ()
    """Positions in the file that hold the CRC-32 of these bytes."""


def _whole(name: str, tensor: TensorRows) -> Sequence[TensorRows]:
    return (tensor,)


@dataclass(frozen=True)
class FolderPlan:
    """Describe the files of a folder, and for each of its tensors the places of its slices."""

    files: Mapping[str, FilePlan]
    places: Mapping[str, Sequence[Place]]
    divide: Callable[[str, TensorRows], Sequence[TensorRows]] = field(default=_whole)

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self.files.values())

    def below(self, folder: str) -> FolderPlan:
        """Return the plan of the same files in a folder inside of the one that is written."""
        files = {f"{folder}/{name}": file for name, file in self.files.items()}
        moved = {
            name: [replace(place, file=f"{folder}/{place.file}") for place in places]
            for name, places in self.places.items()
        }
        return replace(self, files=files, places=moved)


def map_elements(path: Path, offset: int, count: int, dtype: torch.dtype, *, all_soon: bool = False) -> Tensor:
    """Return elements of a file as a flat tensor over its pages.

    Nothing is read before it is used, and the pages leave this process's memory with the tensor. `all_soon`: all of it
    will be used, and the system may read ahead.
    """
    if not count:
        return torch.empty(0, dtype=dtype)
    length, before = count * dtype.itemsize, offset % mmap.ALLOCATIONGRANULARITY
    with path.open("rb") as opened:
        if offset + length > os.fstat(opened.fileno()).st_size:
            raise TesseraError(
                "the file has become shorter since it was opened", where=str(path), code="weights.source-changed"
            )
        # A private mapping: torch wants memory that could be written to.
        mapped = mmap.mmap(opened.fileno(), before + length, offset=offset - before, access=mmap.ACCESS_COPY)
    if all_soon:
        mapped.madvise(mmap.MADV_WILLNEED)
    if offset % dtype.itemsize:
        return torch.frombuffer(bytearray(mapped[before:]), dtype=dtype)
    return torch.frombuffer(mapped, dtype=dtype, count=count, offset=before)
