"""Write the files of a plan: tensors in any order, by several threads, also where a process was interrupted before."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from tessera.checkpoint.files import Entry, safetensors_header, storage_order
from tessera.errors import TesseraError
from tessera.runtime.crc32 import crc32
from tessera.runtime.libc import begin_write_back, same_bytes
from tessera.weights.file_plan import FilePlan, FolderPlan, Place
from tessera.weights.rows import Bytes, TensorRows

Watch = Callable[[Bytes], object]
_WORTH_A_REQUEST = 1 << 20  # bytes that the disk is asked to write at once; less is gathered until the end


def plan_safetensors(
    files: Mapping[str, Sequence[Entry]], metadata: Mapping[str, Mapping[str, str]] | None = None
) -> FolderPlan:
    """Plan safetensors files of these tensors, by the name of the file. `metadata`: notes in the headers of files."""
    plans, places = dict[str, FilePlan](), dict[str, list[Place]]()
    for name, entries in files.items():
        ordered = storage_order(entries)
        header = safetensors_header(ordered, (metadata or {}).get(name))
        at = len(header)
        for entry in ordered:
            places[entry.key] = [Place(name, at)]
            at += entry.nbytes
        plans[name] = FilePlan(at, ((0, header),))
    return FolderPlan(plans, places)


class Scratch(threading.local):
    """Keep memory of each thread for bytes that are read to be compared."""

    def __init__(self) -> None:
        self._bytes: Bytes = np.empty(0, dtype=np.uint8)

    def of_size(self, count: int) -> Bytes:
        if len(self._bytes) < count:
            self._bytes = np.empty(count, dtype=np.uint8)
        return self._bytes[:count]


class PlannedFolder:
    """Write the files of a plan, new ones or those of a process that was interrupted. Use it as a context."""

    def __init__(self, folder: Path, plan: FolderPlan) -> None:
        self._folder, self._plan = folder, plan
        self._handles: dict[str, int] = {}
        self._scratch = Scratch()

    def __enter__(self) -> Self:
        """Write everything but tensors: also where it was written before, since a power cut may have lost any of it."""
        try:
            for name, file in self._plan.files.items():
                path = self._folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
                self._handles[name] = handle
                os.ftruncate(handle, file.size)
                for position, data in file.pieces:
                    _write_at(handle, data, position)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        for handle in self._handles.values():
            os.close(handle)

    def put(self, name: str, tensor: TensorRows, watch: Watch | None = None) -> list[int]:
        """Write a tensor to its places, and return the checksums of its slices. Several threads may do so.

        Each chunk is read again behind its write, while it is in a processor's cache, and must be the same. `watch`
        sees every chunk of the tensor once.
        """
        slices, known = self._plan.divide(name, tensor), dict[int, int]()
        for place in self._plan.places[name]:
            handle, position, checksum = self._handles[place.file], place.offset, 0
            first = place.slice not in known
            for chunk in slices[place.slice].chunks():
                if place.checksums and first:
                    checksum = crc32(chunk, checksum)
                if watch is not None and first:
                    watch(chunk)
                _write_at(handle, chunk.data, position)
                if not self._is_there(handle, chunk, position):
                    raise TesseraError(
                        f"{name} was read back with other bytes than were written",
                        where=str(self._folder / place.file),
                        fix="nothing was published: try again; if it happens twice, check the disk",
                    )
                position += len(chunk)
            if position - place.offset >= _WORTH_A_REQUEST:
                begin_write_back(handle, place.offset, position - place.offset)
            known.setdefault(place.slice, checksum)
        checksums = [known[place.slice] for place in self._plan.places[name]]
        self.put_checksums(name, checksums)
        return checksums

    def holds(self, name: str, tensor: TensorRows, watch: Watch | None = None) -> bool:
        """Return whether all places of a tensor hold its bytes. `watch` sees every chunk once, up to a difference."""
        slices, seen = self._plan.divide(name, tensor), set[int]()
        for place in self._plan.places[name]:
            position = place.offset
            for chunk in slices[place.slice].chunks():
                if watch is not None and place.slice not in seen:
                    watch(chunk)
                if not self._is_there(self._handles[place.file], chunk, position):
                    return False
                position += len(chunk)
            seen.add(place.slice)
        return True

    def _is_there(self, handle: int, chunk: Bytes, position: int) -> bool:
        there = self._scratch.of_size(len(chunk))
        return read_at(handle, there, position) and same_bytes(chunk, there)

    def put_checksums(self, name: str, checksums: Sequence[int]) -> None:
        """Write checksums, as `put` returned them."""
        for place, checksum in zip(self._plan.places[name], checksums, strict=True):
            for position in place.checksums:
                _write_at(self._handles[place.file], checksum.to_bytes(4, "little"), position)

    def sync(self) -> None:
        """Wait until everything is on the disk."""
        for handle in self._handles.values():
            os.fsync(handle)


def _write_at(handle: int, data: bytes | memoryview, position: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(handle, view, position)
        view, position = view[count:], position + count


def read_at(handle: int, target: Bytes, position: int) -> bool:
    """Fill an array with bytes of a file; return whether the file has so many."""
    view = target.data
    while view:
        count = os.preadv(handle, [view], position)
        if not count:
            return False
        view, position = view[count:], position + count
    return True
