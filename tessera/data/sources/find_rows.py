"""Where the rows of a text file lie, found in chunks: lines, records of a CSV file, elements of a JSON array.

Only borders are looked for here. Whether a row can be read shows when it is read, and is that row's own matter.
Each function gives [n, 3] int64: first byte, bytes, and the number a person would count (from 1).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from tessera.core.errors import TesseraError

CHUNK = 1 << 20
BOM = b"\xef\xbb\xbf"
_QUOTE, _BACKSLASH, _NEWLINE = 34, 92, 10
_MOST_BLANKS = 1 << 20  # a longer blank line is not looked at, and is then a row that cannot be read
_BETWEEN = np.zeros(256, dtype=bool)  # what may stand between the elements of an array
_BETWEEN[list(b" \t\r\n,")] = True


def find_lines(path: Path, limit: int | None = None, *, quoted: bool = False) -> np.ndarray:
    """Lines that hold something. `quoted`: a line break between double quotes ends no row (CSV)."""
    found: list[np.ndarray] = []
    count, line, odd = 0, 0, 0
    with path.open("rb") as file, path.open("rb") as again:
        start = len(BOM) if file.read(len(BOM)) == BOM else 0
        for base, data in _chunks(file, start):
            ends = np.flatnonzero(data == _NEWLINE)
            if quoted:
                quotes = np.flatnonzero(data == _QUOTE)
                ends = ends[(np.searchsorted(quotes, ends) + odd) % 2 == 0]
                odd = (odd + len(quotes)) % 2
            if len(ends) == 0:
                continue
            starts = np.concatenate([[start - base], ends[:-1] + 1])
            # A line whose first byte is not seen here, or is no ink, may be blank.
            unsure = (starts < 0) | (data[np.minimum(np.maximum(starts, 0), len(data) - 1)] <= 32)
            ends += base
            rows = _lines(starts + base, ends, unsure, line, again)
            start, line = int(ends[-1]) + 1, line + len(ends)
            found.append(rows)
            count += len(rows)
            if limit is not None and count >= limit:
                return np.concatenate(found)[:limit]
        size = path.stat().st_size
        if start < size:  # a last line without its end
            found.append(_lines(np.array([start]), np.array([size]), np.array([True]), line, again))
    return np.concatenate(found)[:limit] if found else np.empty((0, 3), dtype=np.int64)


def _lines(starts: np.ndarray, ends: np.ndarray, unsure: np.ndarray, before: int, file: BinaryIO) -> np.ndarray:
    numbers = np.arange(before + 1, before + 1 + len(starts))
    rows = np.stack([starts, ends - starts, numbers], axis=1).astype(np.int64)
    full = rows[:, 1] > 0
    for at in np.flatnonzero(unsure & full).tolist():
        start, size, _ = rows[at].tolist()
        full[at] = size > _MOST_BLANKS or bool(_read(file, start, size).strip())
    return rows[full]


def _read(file: BinaryIO, start: int, size: int) -> bytes:
    file.seek(start)
    return file.read(size)


def is_array(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4096).removeprefix(BOM).lstrip().startswith(b"[")


def find_elements(path: Path, limit: int | None = None) -> np.ndarray:
    """Elements of a JSON array, in memory that does not grow with the file."""
    with path.open("rb") as file:
        scan = _ArrayScan(path, limit)
        begin = file.read(4096).index(b"[") + 1
        for base, data in _chunks(file, begin):
            scan.take(base, data)
            if scan.done:
                break
    return scan.rows()


class _ArrayScan:
    """Depth and strings of a JSON array, chunk by chunk. Quotes and brackets are found by whole-array operations."""

    def __init__(self, path: Path, limit: int | None) -> None:
        self.path, self.limit = path, limit
        self.depth = 1  # of brackets; elements lie at 2
        self.in_string = 0
        self.escaped = False  # the next byte stands behind a backslash
        self.ended = False
        self.count = 0
        self._starts: list[np.ndarray] = []
        self._ends: list[np.ndarray] = []

    @property
    def done(self) -> bool:
        return self.limit is not None and self.count >= self.limit

    def take(self, base: int, data: np.ndarray) -> None:
        if self.ended:
            return self._check_between(base, data, np.array([0]), np.array([len(data)]))
        between_elements = self.depth == 1
        at, sign = self._brackets(data)
        depth = self.depth + np.cumsum(sign)
        last = np.flatnonzero(depth == 0)
        if len(last):
            at, sign, depth = (x[: last[0] + 1] for x in (at, sign, depth))
            self.ended = True
        starts = at[(sign > 0) & (depth == 2)]
        ends = at[(sign < 0) & (depth == 1)] + 1
        self.depth = int(depth[-1]) if len(depth) else self.depth
        gap_starts = np.concatenate([[0], ends]) if between_elements else ends
        gap_ends = np.concatenate([starts, [at[-1] if self.ended else len(data)]]) if self.depth < 2 else starts
        self._check_between(base, data, gap_starts, gap_ends)
        if self.ended:
            self._check_between(base, data, at[-1:] + 1, np.array([len(data)]))
        self._starts.append(starts + base)
        self._ends.append(ends + base)
        self.count += len(ends)

    def _brackets(self, data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Places of brackets outside of strings, and +1 or -1 for each."""
        quotes = data == _QUOTE
        slashes = np.flatnonzero(data == _BACKSLASH)
        if self.escaped:
            quotes[0] = False
            slashes = slashes[1:] if len(slashes) and slashes[0] == 0 else slashes
        self.escaped = False
        if len(slashes):
            # Of a run of backslashes each second one is itself escaped: an odd run escapes what follows.
            breaks = np.flatnonzero(np.diff(slashes) != 1)
            first = slashes[np.concatenate([[0], breaks + 1])]
            last = slashes[np.concatenate([breaks, [len(slashes) - 1]])]
            escaped = last[(last - first) % 2 == 0] + 1
            if len(escaped) and escaped[-1] == len(data):
                self.escaped, escaped = True, escaped[:-1]
            quotes[escaped] = False
        borders = np.flatnonzero(quotes)
        folded = data | 32  # brackets become braces
        at = np.flatnonzero((folded == 123) | (folded == 125))
        outside = (np.searchsorted(borders, at) + self.in_string) % 2 == 0
        self.in_string = (self.in_string + len(borders)) % 2
        at = at[outside]
        return at, 124 - folded[at].astype(np.int64)

    def _check_between(self, base: int, data: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> None:
        lengths = ends - starts
        before = np.cumsum(lengths) - lengths
        places = np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))
        wrong = np.flatnonzero(~_BETWEEN[data[places]])
        if len(wrong):
            place = int(places[wrong[0]])
            row = self.count + int(np.searchsorted(starts, place, side="right"))
            raise TesseraError(
                f"between rows of the JSON array stands {bytes(data[place : place + 20])!r}",
                where=f"{self.path}, byte {base + place}, near row {row}",
                fix="rows are JSON objects: [{...}, {...}]",
            )

    def rows(self) -> np.ndarray:
        starts = np.concatenate(self._starts) if self._starts else np.empty(0, dtype=np.int64)
        ends = np.concatenate(self._ends) if self._ends else np.empty(0, dtype=np.int64)
        if not self.ended and not self.done:
            inside = f", in the middle of row {len(ends) + 1}" if len(starts) > len(ends) else ""
            raise TesseraError(
                f"the JSON array ends after {len(ends)} rows without ']'{inside}",
                where=str(self.path),
                fix="the file was cut off, or a quote or bracket is missing in it",
            )
        count = len(ends) if self.limit is None else min(self.limit, len(ends))
        starts, ends = starts[:count], ends[:count]
        return np.stack([starts, ends - starts, np.arange(1, count + 1)], axis=1).astype(np.int64)


def _chunks(file: BinaryIO, start: int) -> Iterator[tuple[int, np.ndarray]]:
    file.seek(start)
    at = start
    while data := file.read(CHUNK):
        yield at, np.frombuffer(data, dtype=np.uint8)
        at += len(data)
