"""Files that survive a power cut: written, hashed and synced, with a hook before and after each step that can fail.

A test hands in a `Fault` that kills the process or raises at a named point; in production the hook does nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from io import BufferedWriter
from pathlib import Path
from typing import Self

Fault = Callable[[str], None]
CHUNK_BYTES = 16 << 20


def no_fault(point: str) -> None:
    """The hook of every real run."""


@dataclass(frozen=True)
class FileRecord:
    """What a manifest says of a file."""

    name: str
    size: int
    sha256: str


class DurableFile:
    """A new file that is hashed while it is written and synced when it is closed. `record` is filled by then."""

    def __init__(self, path: Path, fault: Fault = no_fault) -> None:
        self._path = path
        self._fault = fault
        self._hash = hashlib.sha256()
        self._size = 0
        self._file: BufferedWriter | None = None
        self.record: FileRecord | None = None

    def open(self) -> None:
        self._fault(f"open {self._path.name}")
        self._file = self._path.open("xb")

    def write(self, data: bytes | memoryview) -> None:
        assert self._file is not None, "the file is not open"
        view = memoryview(data).cast("B")
        for start in range(0, len(view), CHUNK_BYTES):
            piece = view[start : start + CHUNK_BYTES]
            self._file.write(piece)
            self._hash.update(piece)
        self._size += len(view)

    def close(self) -> None:
        assert self._file is not None, "the file is not open"
        name = self._path.name
        with self._file:
            self._fault(f"flush {name}")
            self._file.flush()
            self._fault(f"fsync {name}")
            os.fsync(self._file.fileno())
        self._fault(f"closed {name}")
        self.record = FileRecord(name, self._size, self._hash.hexdigest())

    def abandon(self) -> None:
        """Closes what is open; what cannot be flushed any more is lost, as it should be."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def finished(self) -> FileRecord:
        assert self.record is not None, "the file is still open"
        return self.record


def write_file(path: Path, data: bytes, fault: Fault = no_fault) -> FileRecord:
    with DurableFile(path, fault) as file:
        fault(f"write {path.name}")
        file.write(data)
    return file.finished()


def sync_folder(folder: Path, fault: Fault = no_fault) -> None:
    """Makes the names in a folder durable; syncing a file alone does not."""
    fault(f"fsync folder {_plain(folder)}")
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def rename(source: Path, target: Path, fault: Fault = no_fault) -> None:
    """One atomic step, made durable at once."""
    fault(f"rename {_plain(source)}")
    os.rename(source, target)
    fault(f"renamed {_plain(source)}")
    sync_folder(target.parent, fault)


def hash_file(path: Path) -> FileRecord:
    digest = hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        while piece := file.read(CHUNK_BYTES):
            digest.update(piece)
            size += len(piece)
    return FileRecord(path.name, size, digest.hexdigest())


def remove_folder(folder: Path) -> None:
    """Best effort: what cannot be removed now is removed at the next start."""
    shutil.rmtree(folder, ignore_errors=True)


def free_bytes(folder: Path) -> int:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def human_bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _plain(path: Path) -> str:
    """A name without its random part, so that fault points have the same names in every run."""
    return path.name.split("~")[0]
