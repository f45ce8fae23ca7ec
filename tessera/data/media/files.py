"""Where the bytes of a media part lie: a file under the data root, a member of an archive, or memory."""

from __future__ import annotations

import io
import os
import re
import stat
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from tessera.core.errors import TesseraError
from tessera.data.sources.within import Within

_URL = re.compile(r"^(?:[A-Za-z][A-Za-z0-9+.\-]*://|data:|file:)")


class Opened(NamedTuple):
    """A readable, seekable stream, and what errors call it."""

    file: BinaryIO
    name: str


def resolve(value: Any, root: Path) -> Path:
    """The file a data set means by a path. It must exist and lie under `root` after links are followed."""
    return Path(_place(value, root)[0])


def _place(value: Any, root: Path) -> tuple[str, os.stat_result]:
    """The path of a file and what the system knows of it.

    Without a link between the root and the file, the file is where its name says; only then links are followed.
    """
    if not isinstance(value, (str, Path)) or "\0" in str(value):
        raise TesseraError(f"not a path: {value!r:.80}")
    text = str(value)
    if _URL.match(text):
        raise TesseraError(
            f"media is read from files, not from URLs: {text:.80}", fix="download it below the data root"
        )
    base = os.path.abspath(root)
    inner = text.removeprefix(base + os.sep) if text.startswith(os.sep) else text
    parts = inner.split(os.sep)
    if ".." in parts:
        raise TesseraError(f"path with '..': {text}", fix="write paths relative to the data root")
    try:
        if inner.startswith(os.sep):  # another folder than the root, or another name of it
            return _followed(text, base)
        path = base
        found = os.lstat(base) if inner in ("", ".") else None
        for part in parts:
            if part and part != ".":
                path = f"{path}{os.sep}{part}" if path != os.sep else path + part
                found = os.lstat(path)
                if stat.S_ISLNK(found.st_mode):
                    return _followed(os.path.join(base, inner), base)
        assert found is not None
        return path, found
    except (FileNotFoundError, NotADirectoryError):
        raise TesseraError(f"no such file: {text:.200}") from None
    except OSError as error:  # a name too long, a circle of links, a folder that may not be entered
        raise TesseraError(f"not a usable path: {text:.80} ({error.strerror})") from None


def _followed(text: str, base: str) -> tuple[str, os.stat_result]:
    path, top = os.path.realpath(text), os.path.realpath(base)
    if path != top and not path.startswith(top.rstrip(os.sep) + os.sep):
        raise TesseraError(
            f"path outside the data root: {text}", fix="set `root` of the data source to a folder above it"
        )
    return path, os.stat(path)


def folder_of(value: Any, root: Path) -> Path | None:
    """The folder that a path means, or None when it means something else."""
    if not isinstance(value, (str, Path)):
        return None
    path, found = _place(value, root)
    return Path(path) if stat.S_ISDIR(found.st_mode) else None


@contextmanager
def opened(value: Any, root: Path, kind: str) -> Iterator[Opened]:
    """The bytes of a media part. `kind` is the word for what it should be."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        yield Opened(io.BytesIO(value), f"{kind} given as bytes")
        return
    if isinstance(value, Within):
        with _open(str(value.file), value.name) as file:
            yield Opened(_part_of(file, value), value.name)
        return
    path, found = _place(value, root)
    name = os.path.basename(path)
    if not stat.S_ISREG(found.st_mode):  # opening a pipe would wait for someone to write into it
        raise TesseraError(f"not a file: {name}")
    with _open(path, name) as file:
        yield Opened(file, name)


def _open(path: str, name: str) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise TesseraError(f"cannot be opened: {name} ({error.strerror})") from None


def _part_of(file: BinaryIO, member: Within) -> BinaryIO:
    size = os.fstat(file.fileno()).st_size
    if member.start < 0 or member.size < 0 or member.start + member.size > size:
        raise TesseraError(f"{member.name} ends behind the end of {member.file.name}: the archive was cut or changed")
    return stretches(file, [(member.start, member.size)])


def size_of(file: BinaryIO) -> int:
    return file.seek(0, io.SEEK_END)


def stretches(file: BinaryIO, spans: Sequence[tuple[int, int]]) -> BinaryIO:
    """Stretches of a file, each (start, size), one after another as a file; nothing is copied."""
    return cast(BinaryIO, io.BufferedReader(_Stretches(file, spans)))


class _Stretches(io.RawIOBase):
    def __init__(self, file: BinaryIO, spans: Sequence[tuple[int, int]]) -> None:
        self._file, self._spans, self._at = file, spans, 0
        self._ends = list(accumulate(size for _, size in spans))

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        total = self._ends[-1] if self._ends else 0
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: total}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        number = bisect_right(self._ends, self._at)
        if number == len(self._ends):
            return 0
        start, size = self._spans[number]
        left = self._ends[number] - self._at
        room = memoryview(buffer)[:left]
        self._file.seek(start + size - left)
        data = self._file.read(len(room))
        room[: len(data)] = data
        self._at += len(data)
        return len(data)
