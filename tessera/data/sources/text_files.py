"""JSON arrays, JSONL, CSV and plain text: files in which a row is a stretch of bytes."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from tessera.core.errors import TesseraError
from tessera.data.sources.container import MAX_ROW_BYTES, Raw, file_facts
from tessera.data.sources.find_rows import BOM, find_elements, find_lines, is_array
from tessera.data.sources.forms import RowError
from tessera.data.sources.table import Table, kept

_MAX_HEADER_BYTES = 1 << 20
_BLOCK = 4096  # rows whose places are looked up at once


class SpanFile:
    """Rows of one file. `spans` holds (first byte, bytes, number in the file counted from 1) of each."""

    def __init__(
        self, path: Path, name: str, kind: Literal["json", "csv", "text"], spans: Table, facts: dict[str, Any]
    ) -> None:
        self.path = path
        self.name = name  # what places are called by
        self.kind = kind
        self.spans = spans
        self._facts = facts
        self.header: list[str] = []

    def __len__(self) -> int:
        return len(self.spans)

    def place(self, row: int) -> str:
        return f"{self.name}:{int(self.spans.array[row, 2])}"

    def load(self, row: int) -> Raw:
        start, size, _ = self.spans.array[row].tolist()
        with self.path.open("rb") as file:
            return self._read(file, start, size, self.place(row))

    def scan(self, rows: range) -> Iterator[tuple[int, Raw | RowError]]:
        assert rows.step == 1
        with self.path.open("rb", buffering=1 << 18) as file:
            for first in range(rows.start, rows.stop, _BLOCK):
                block = self.spans.array[first : min(first + _BLOCK, rows.stop)].tolist()
                for row, (start, size, number) in enumerate(block, start=first):
                    try:
                        yield row, self._read(file, start, size, f"{self.name}:{number}")
                    except RowError as error:
                        yield row, error

    def facts(self) -> dict[str, Any]:
        return self._facts

    def _read(self, file: BinaryIO, start: int, size: int, place: str) -> Raw:
        if size > MAX_ROW_BYTES:
            raise RowError(place, f"a row of {size} bytes is too large to be a conversation")
        file.seek(start)
        data = file.read(size)
        if len(data) != size:
            raise RowError(place, "the file ends before this row does: it changed since it was opened")
        if self.kind == "json":
            return Raw(load_object(data, place))
        text = load_text(data, place)
        return Raw({"text": text}) if self.kind == "text" else Raw(self._record(text, place))

    def _record(self, text: str, place: str) -> dict[str, Any]:
        try:
            fields = next(csv.reader(io.StringIO(text), strict=True))
        except (csv.Error, StopIteration) as error:
            raise RowError(place, f"not readable as CSV: {error}") from None
        if len(fields) != len(self.header):
            raise RowError(place, f"{len(fields)} fields where the header names {len(self.header)}")
        return {name: value for name, value in zip(self.header, fields, strict=True) if value != ""}


def load_object(data: bytes, place: str) -> dict[str, Any]:
    try:
        content = json.loads(data.decode())
    except UnicodeDecodeError as error:
        raise RowError(place, f"not UTF-8: {error.reason} at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise RowError(place, f"not readable as JSON: {error}") from None
    if not isinstance(content, dict):
        raise RowError(place, f"a row is a JSON object, this is a {type(content).__name__}")
    return content


def load_text(data: bytes, place: str) -> str:
    try:
        text = data.removeprefix(BOM).decode()
    except UnicodeDecodeError as error:
        raise RowError(place, f"not UTF-8: {error.reason} at byte {error.start}") from None
    if "\0" in text:
        raise RowError(place, "has NUL bytes: this is not a text")
    return text.strip("\r\n")


def open_json(path: Path, name: str, limit: int | None, cache_folder: Path | None) -> SpanFile:
    """A JSON array, or one object a line."""
    return _open(path, name, "json", limit, cache_folder)


def open_text(path: Path, name: str, limit: int | None, cache_folder: Path | None) -> SpanFile:
    """A document a line."""
    return _open(path, name, "text", limit, cache_folder)


def open_csv(path: Path, name: str, limit: int | None, cache_folder: Path | None) -> SpanFile:
    """A record a line, the first of which names the fields."""
    opened = _open(path, name, "csv", limit, cache_folder)
    first = find_lines(path, 1, quoted=True)
    if len(first):
        start, size, _ = first[0].tolist()
        if size > _MAX_HEADER_BYTES:
            raise TesseraError("the first line is too long to be the header of a CSV file", where=str(path))
        with path.open("rb") as file:
            file.seek(start)
            try:
                opened.header = next(csv.reader(io.StringIO(load_text(file.read(size), name)), strict=True))
            except (RowError, csv.Error) as error:
                raise TesseraError(f"the header cannot be read: {error}", where=str(path)) from None
    return opened


def _open(
    path: Path, name: str, kind: Literal["json", "csv", "text"], limit: int | None, cache_folder: Path | None
) -> SpanFile:
    facts = file_facts(path)

    def find() -> np.ndarray:
        if kind == "json" and is_array(path):
            return find_elements(path, limit)
        if kind == "csv":  # without its header
            return find_lines(path, None if limit is None else limit + 1, quoted=True)[1:]
        return find_lines(path, limit)

    def sound(spans: np.ndarray) -> bool:
        whole = spans.dtype == np.int64 and spans.ndim == 2 and spans.shape[1] == 3
        return whole and (len(spans) == 0 or 0 <= int(spans[-1, 0]) <= int(facts["size"]) - int(spans[-1, 1]))

    return SpanFile(path, name, kind, kept("rows", [kind, limit, facts], cache_folder, find, sound=sound), facts)
