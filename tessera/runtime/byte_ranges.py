"""Present ranges of an open file as a file, for libraries that read files: a member of an archive, or several parts."""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, BinaryIO, cast


def byte_ranges(file: BinaryIO, spans: Sequence[tuple[int, int]], most: int | None = None) -> BinaryIO:
    """Return a file object that concatenates ranges (start, size) of a file. Nothing is copied.

    `most`: a single read of more bytes raises `ValueError`.
    """
    return cast(BinaryIO, io.BufferedReader(_ByteRanges(file, spans, most)))


class _ByteRanges(io.RawIOBase):
    def __init__(self, file: BinaryIO, spans: Sequence[tuple[int, int]], most: int | None) -> None:
        self._file, self._spans, self._most, self._at = file, spans, most, 0
        self._ends = list(accumulate(size for _, size in spans))

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        total = self._ends[-1] if self._ends else 0
        position = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: total}[whence] + offset
        if position < 0:
            raise OSError("negative position")
        self._at = position
        return self._at

    def readinto(self, buffer: Any) -> int:
        if self._most is not None and len(buffer) > self._most:
            raise ValueError(f"a read of {len(buffer):,} bytes; the limit is {self._most:,}")
        number = bisect_right(self._ends, self._at)
        if number == len(self._ends):
            return 0
        start, size = self._spans[number]
        remaining = self._ends[number] - self._at
        room = memoryview(buffer)[:remaining]
        self._file.seek(start + size - remaining)
        data = self._file.read(len(room))
        room[: len(data)] = data
        self._at += len(data)
        return len(data)
