"""JSONL, JSON arrays, CSV, TSV and plain text: files in which a record is a span of bytes.

Opening a file only finds the spans of its records. A record is parsed when it is read, so a damaged record does not
affect the others.
"""

from __future__ import annotations

import csv
import io
import json
import mmap
import re
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from tessera.data.sources.container import MAX_RECORD_BYTES, Container, RawRecord, RecordError, fail, file_facts
from tessera.data.tables import AnyTables, cached_tables
from tessera.errors import TesseraError, first_line
from tessera.runtime.files import open_regular

TextKind = Literal["json", "csv", "tsv", "text"]
_DELIMITERS = {"csv": ",", "tsv": "\t"}
CHUNK = 1 << 20
_BOM = b"\xef\xbb\xbf"
_QUOTE, _NEWLINE = 34, 10
_MAX_BLANK_BYTES = 1 << 20  # longer lines count as records without a check whether they are blank
_MAX_HEADER_BYTES = 1 << 20
_SPANS_PER_READ = 4096
# Matches JSON up to the next bracket outside of a string. Possessive quantifiers prevent backtracking.
_TO_BRACKET = re.compile(rb'[^"{}\[\]]*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"[^"{}\[\]]*+)*+([{}\[\]])', re.DOTALL)
_BETWEEN_ELEMENTS = b" \t\r\n,"


class TextFile(Container):
    """Read the records of a text file.

    The array `tables["spans"]` [records, 3] has the first byte, the size in bytes, and the line or record number.
    """

    def __init__(self, path: Path, name: str, kind: TextKind, tables: AnyTables, facts: dict[str, Any]) -> None:
        super().__init__(name, len(tables["spans"]), facts)
        self.path = path
        self.kind = kind
        self.tables = tables
        self.header = _csv_header(path, name, _DELIMITERS[kind]) if kind in _DELIMITERS else []

    def location(self, number: int) -> str:
        return f"{self.name}:{int(self.tables['spans'][number, 2])}"

    def load(self, number: int) -> RawRecord:
        start, size, _ = self.tables["spans"][number].tolist()
        with open_regular(self.path) as file:
            return self._read(file, start, size, self.location(number))

    def scan(self, numbers: range) -> Iterator[tuple[int, RawRecord | RecordError]]:
        assert numbers.step == 1
        with open_regular(self.path, 1 << 18) as file:
            for first in range(numbers.start, numbers.stop, _SPANS_PER_READ):
                spans = self.tables["spans"][first : min(first + _SPANS_PER_READ, numbers.stop)].tolist()
                for number, (start, size, counted) in enumerate(spans, start=first):
                    try:
                        yield number, self._read(file, start, size, f"{self.name}:{counted}")
                    except RecordError as error:
                        yield number, error

    def _read(self, file: BinaryIO, start: int, size: int, location: str) -> RawRecord:
        if size > MAX_RECORD_BYTES:
            fail(
                "data.record-too-large", f"the record has {size} bytes, the limit is {MAX_RECORD_BYTES}", where=location
            )
        file.seek(start)
        data = file.read(size)
        if len(data) != size:
            fail(
                "data.file-changed", "the file ends within this record: it changed since it was opened", where=location
            )
        if self.kind == "json":
            return RawRecord(load_object(data, location))
        text = load_text(data, location)
        return RawRecord({"text": text} if self.kind == "text" else self._csv_fields(text, location))

    def _csv_fields(self, text: str, location: str) -> dict[str, Any]:
        csv.field_size_limit(MAX_RECORD_BYTES)  # cells may contain images in base64
        try:
            fields = next(csv.reader(io.StringIO(text), strict=True, delimiter=_DELIMITERS[self.kind]))
        except (csv.Error, StopIteration) as error:
            raise RecordError(f"not valid CSV: {error}", where=location, code="data.damaged-csv") from None
        if len(fields) != len(self.header):
            what = f"the record has {len(fields)} fields, the header {len(self.header)}"
            raise RecordError(what, where=location, code="data.damaged-csv")
        return {name: value for name, value in zip(self.header, fields, strict=True) if value != ""}


def load_object(data: bytes, location: str) -> dict[str, Any]:
    """Parse a JSON object. Raise `RecordError` if it is not valid."""
    text = _decoded(data, location)
    try:
        content = json.loads(text, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"not valid JSON: {error}", where=location, code="data.damaged-json") from None
    if not isinstance(content, dict):
        what = f"a record must be a JSON object, not a {type(content).__name__}"
        raise RecordError(what, where=location, code="data.record-not-an-object")
    return content


def _decoded(data: bytes, location: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        what = f"not UTF-8: {error.reason} at byte {error.start}"
        raise RecordError(what, where=location, code="data.not-utf8") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict. Raise ValueError if a key occurs twice."""
    content = dict(pairs)
    if len(content) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r:.80} occurs twice")
    return content


def load_text(data: bytes, location: str) -> str:
    """Decode text and strip line ends at both sides. Raise `RecordError` if it is not valid."""
    text = _decoded(data.removeprefix(_BOM), location)
    if "\0" in text:
        raise RecordError("NUL bytes: this is not a text file", where=location, code="data.not-a-text")
    return text.strip("\r\n")


def open_text_file(path: Path, name: str, kind: TextKind, limit: int | None, cache_folder: Path | None) -> TextFile:
    """Open a file and find its records: JSON objects in an array or one per line, CSV records, or lines of text."""
    facts = file_facts(path)

    def find_spans() -> dict[str, np.ndarray]:
        if kind == "json" and _is_array(path):
            return {"spans": find_elements(path, limit)}
        if kind in _DELIMITERS:  # CSV and TSV: leave out the header
            return {"spans": find_lines(path, None if limit is None else limit + 1, quoted=True)[1:]}
        return {"spans": find_lines(path, limit)}

    def is_valid(tables: AnyTables) -> bool:
        spans = tables.get("spans", np.empty(0))
        shaped = spans.dtype == np.int64 and spans.ndim == 2 and spans.shape[1] == 3
        return shaped and (len(spans) == 0 or 0 <= int(spans[-1, 0]) <= int(facts["size"]) - int(spans[-1, 1]))

    tables = cached_tables("rows", [kind, limit, facts], cache_folder, find_spans, is_valid)
    return TextFile(path, name, kind, tables, facts)


def _csv_header(path: Path, name: str, delimiter: str) -> list[str]:
    first = find_lines(path, 1, quoted=True)
    if not len(first):
        return []
    start, size, _ = first[0].tolist()
    with open_regular(path) as file:
        file.seek(start)
        try:
            if size > _MAX_HEADER_BYTES:
                raise csv.Error(f"the first line has more than {_MAX_HEADER_BYTES} bytes")
            header = next(csv.reader(io.StringIO(load_text(file.read(size), name)), strict=True, delimiter=delimiter))
        except (RecordError, csv.Error) as error:
            raise TesseraError(
                f"the CSV header is unreadable: {first_line(error)}", where=str(path), code="data.bad-csv-header"
            ) from None
    names = [column for column in header if column]  # spreadsheets add empty columns at the end
    if len(set(names)) != len(names):
        raise TesseraError(
            "two columns have the same name",
            where=str(path),
            fix="rename one of them in the header",
            code="data.column-twice",
        )
    return header


# ---------------------------------------------------------------------------------------------- spans


def find_lines(path: Path, limit: int | None = None, *, quoted: bool = False) -> np.ndarray:
    """Return an array [lines, 3] of lines that are not blank: first byte, size in bytes, line number.

    `quoted`: ignore line ends in double quotes (CSV).
    """
    parts: list[np.ndarray] = []
    count, lines_before, open_quotes = 0, 0, 0
    with open_regular(path) as file, open_regular(path) as again:
        start = len(_BOM) if file.read(len(_BOM)) == _BOM else 0
        file.seek(start)
        base = start
        while chunk := file.read(CHUNK):
            data = np.frombuffer(chunk, dtype=np.uint8)
            ends = np.flatnonzero(data == _NEWLINE)
            if quoted:
                quotes = np.flatnonzero(data == _QUOTE)
                ends = ends[(np.searchsorted(quotes, ends) + open_quotes) % 2 == 0]
                open_quotes = (open_quotes + len(quotes)) % 2
            if len(ends):
                starts = np.concatenate([[start - base], ends[:-1] + 1])
                # Lines that may be blank: they begin before this chunk, or with white space.
                unsure = (starts < 0) | (data[np.minimum(np.maximum(starts, 0), len(data) - 1)] <= 32)
                spans = _without_blank(starts + base, ends + base, unsure, lines_before, again)
                start, lines_before = base + int(ends[-1]) + 1, lines_before + len(ends)
                parts.append(spans)
                count += len(spans)
                if limit is not None and count >= limit:
                    break
            base += len(chunk)
        else:
            if start < base:  # the last line has no line end
                parts.append(_without_blank(np.array([start]), np.array([base]), np.array([True]), lines_before, again))
    return np.concatenate(parts)[:limit] if parts else np.empty((0, 3), dtype=np.int64)


def _without_blank(
    starts: np.ndarray, ends: np.ndarray, unsure: np.ndarray, lines_before: int, file: BinaryIO
) -> np.ndarray:
    numbers = np.arange(lines_before + 1, lines_before + 1 + len(starts))
    spans = np.stack([starts, ends - starts, numbers], axis=1).astype(np.int64)
    keep = spans[:, 1] > 0
    for line in np.flatnonzero(unsure & keep).tolist():
        start, size, _ = spans[line].tolist()
        file.seek(start)
        keep[line] = size > _MAX_BLANK_BYTES or bool(file.read(size).strip())
    return spans[keep]


def _is_array(path: Path) -> bool:
    with open_regular(path) as file:
        return file.read(4096).removeprefix(_BOM).lstrip().startswith(b"[")


def find_elements(path: Path, limit: int | None = None) -> np.ndarray:
    """Return an array [records, 3] of the elements of a JSON array: first byte, size in bytes, record number.

    They are found by matching brackets outside of strings.
    """
    spans = array("q")
    with open_regular(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        position = element_end = data.find(b"[") + 1
        element_start, depth, count = position, 1, 0
        while depth and (limit is None or count < limit):
            match = _TO_BRACKET.match(data, position)
            if match is None:
                inside = f", within record {count + 1}" if depth > 1 else ""
                raise TesseraError(
                    f"the JSON array ends after {count} records without ']'{inside}",
                    where=str(path),
                    fix="write the file again: it is truncated, or a quote or bracket is missing",
                    code="data.damaged-json",
                )
            bracket, position = match.start(1), match.end()
            opens = data[bracket] in b"{["
            depth += 1 if opens else -1
            if opens and depth == 2:
                _check_between(path, data, element_end, bracket, count)
                element_start = bracket
            elif not opens and depth == 1:
                count, element_end = count + 1, position
                spans.extend((element_start, position - element_start, count))
            elif depth == 0:
                _check_between(path, data, element_end, bracket, count)
                _check_between(path, data, position, len(data), count)
    return np.frombuffer(spans, dtype=np.int64).reshape(-1, 3) if spans else np.empty((0, 3), dtype=np.int64)


def _check_between(path: Path, data: mmap.mmap, start: int, end: int, count: int) -> None:
    for first in range(start, end, CHUNK):
        wrong = data[first : min(end, first + CHUNK)].lstrip(_BETWEEN_ELEMENTS)
        if wrong:
            raise TesseraError(
                f"unexpected text between records of the JSON array: {wrong[:20]!r}",
                where=f"{path}, byte {min(end, first + CHUNK) - len(wrong)}, near record {count + 1}",
                fix="write records as JSON objects: [{...}, {...}]",
                code="data.damaged-json",
            )
