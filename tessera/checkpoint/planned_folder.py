"""Write the files of a plan: tensors in any order, by several threads, also where a process was interrupted before."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tessera.checkpoint.files import Entry, safetensors_header, storage_order
from tessera.core.crc32 import crc32
from tessera.core.file_plan import FilePlan, FolderPlan, Place
from tessera.core.tensor_rows import TensorRows


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


class PlannedFolder:
    """Write the files of a plan, new ones or those of a process that was interrupted. Use it as a context."""

    def __init__(self, folder: Path, plan: FolderPlan) -> None:
        self._folder, self._plan = folder, plan
        self._handles: dict[str, int] = {}

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

    def put(self, name: str, tensor: TensorRows) -> list[int]:
        """Write a tensor to its places, and return the checksums of its slices. Several threads may do so."""
        slices, known = self._plan.divide(name, tensor), dict[int, int]()
        for place in self._plan.places[name]:
            position, checksum = place.offset, 0
            for chunk in slices[place.slice].chunks():
                if place.checksums and place.slice not in known:
                    checksum = crc32(chunk, checksum)
                _write_at(self._handles[place.file], chunk.data, position)
                position += len(chunk)
            known.setdefault(place.slice, checksum)
        checksums = [known[place.slice] for place in self._plan.places[name]]
        self.put_checksums(name, checksums)
        return checksums

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
