"""JSON and JSONL files of conversations, in three spellings, as `Sample`s.

    messages   {"messages": [{"role": "user", "content": "text" or [{"type": "image", "image": "a.jpg"}, ...]}, ...]}
    sharegpt   {"conversations": [{"from": "human", "value": "<image> text"}, ...], "images": ["a.jpg"]}
    llava      {"conversations": [{"from": "human", "value": "<image>\\n text"}, ...], "image": "a.jpg"}

A source keeps where each row lies in the file and reads a row when asked, so that a data set never sits in memory and a
source may travel to another process: it holds no open file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from tessera.core.errors import TesseraError, nearest
from tessera.core.types import Sample
from tessera.data.forms import PARSERS, RowError, decide

Form = Literal["messages", "sharegpt", "llava"]
MAX_ROW_BYTES = 64 << 20  # one row of text and paths; more than this is not a conversation


@dataclass(frozen=True, eq=False)
class FileSource:
    """Rows of one file. `spans[i]` is (first byte, bytes, number in the file counted from 1)."""

    path: Path
    root: Path  # media paths must lie under it
    form: Form
    spans: np.ndarray  # [n, 3] int64

    def __len__(self) -> int:
        return len(self.spans)

    def only(self, rows: np.ndarray) -> FileSource:
        return replace(self, spans=self.spans[rows])

    def place(self, row: int) -> str:
        return f"{self.path.name}:{int(self.spans[row, 2])}"

    def read(self, row: int) -> Sample:
        """The sample in a row. `RowError` when this row cannot be used; `TesseraError` when the file cannot."""
        with self.path.open("rb") as file:
            return self._parse(row, self.row_bytes(file, row))

    def __iter__(self) -> Iterator[tuple[int, Sample | RowError]]:
        """All rows in order through one handle: for the index, which looks at each once."""
        with self.path.open("rb") as file:
            for row in range(len(self)):
                try:
                    yield row, self._parse(row, self.row_bytes(file, row))
                except RowError as error:
                    yield row, error

    def row_bytes(self, file: BinaryIO, row: int) -> bytes:
        start, size, _ = self.spans[row].tolist()
        if size > MAX_ROW_BYTES:
            raise RowError(self.place(row), f"a row of {size} bytes is too large to be a conversation")
        file.seek(start)
        return file.read(size)

    def _parse(self, row: int, data: bytes) -> Sample:
        place = self.place(row)
        content = load_row(data, place)
        found = decide(content)
        if found is not None and found != self.form:
            raise TesseraError(
                f"this row has the form {found!r}, the file was read as {self.form!r}",
                where=f"{self.path}:{int(self.spans[row, 2])}",
                fix="keep one form per file, and list several files under data.train",
            )
        given = content.get("id")
        name = str(given) if isinstance(given, (str, int)) and not isinstance(given, bool) and given != "" else place
        try:
            return Sample(name, PARSERS[self.form](content))
        except RowError as error:
            raise RowError(name, error.reason) from None


def open_source(
    path: Path, root: Path | None = None, form: Form | Literal["auto"] = "auto", max_samples: int | None = None
) -> FileSource:
    """Finds the rows of a file and, with `auto`, their form: that of the first row that tells."""
    if not path.is_file():
        beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise TesseraError(
            f"no such data file: {path}",
            where="data",
            nearest=nearest(path.name, beside),
            fix="give the path of a JSON or JSONL file",
        )
    spans = _find_rows(path)
    if max_samples is not None:
        spans = spans[:max_samples]
    if len(spans) == 0:
        raise TesseraError("the data file has no rows", where=str(path))
    root = path.parent if root is None else root
    if not root.is_dir():
        raise TesseraError(f"no such folder for media: {root}", where=f"data source {path}", fix="mend `root`")
    source = FileSource(path, root, "sharegpt" if form == "auto" else form, spans)
    return replace(source, form=_detect(source)) if form == "auto" else source


def _detect(source: FileSource) -> Form:
    """Text-only rows look alike in LLaVA and ShareGPT files, so the first row is not always the one that tells."""
    form: Form | None = None
    with source.path.open("rb") as file:
        for row in range(len(source)):
            try:
                content = load_row(source.row_bytes(file, row), source.place(row))
            except RowError:
                continue
            form = decide(content)
            if form is not None:
                return form
            if "conversations" not in content:
                break
        else:
            return "sharegpt"
    raise TesseraError(
        f"cannot tell the form of the rows; the first has the keys {sorted(content)[:8]}",
        where=f"{source.path}:{int(source.spans[row, 2])}",
        allowed=["messages", "sharegpt (conversations, images)", "llava (conversations, image)"],
    )


def load_row(data: bytes, place: str) -> dict[str, Any]:
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RowError(place, f"not readable as JSON: {error}") from None
    if not isinstance(content, dict):
        raise RowError(place, f"a row is a JSON object, this is a {type(content).__name__}")
    return content


def _find_rows(path: Path) -> np.ndarray:
    with path.open("rb") as file:
        head = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    rows = _rows_of_array(path) if head.startswith(b"[") else _rows_of_lines(path)
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def _rows_of_lines(path: Path) -> list[tuple[int, int, int]]:
    rows: list[tuple[int, int, int]] = []
    at = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            skip = 3 if number == 1 and line.startswith(b"\xef\xbb\xbf") else 0
            if line[skip:].strip():
                rows.append((at + skip, len(line) - skip, number))
            at += len(line)
    return rows


def _rows_of_array(path: Path) -> list[tuple[int, int, int]]:
    """Where the elements of a JSON array lie. Their text is held while it is scanned, the elements never together."""
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise TesseraError(f"not UTF-8: {error.reason} at byte {error.start}", where=str(path)) from None
    decoder = json.JSONDecoder()
    rows: list[tuple[int, int, int]] = []
    at = text.index("[") + 1
    byte = len(text[:at].encode())
    while True:
        start = _skip(text, at, " \t\r\n," if rows else " \t\r\n")
        if start >= len(text):
            raise TesseraError(f"the JSON array ends after {len(rows)} rows without ']'", where=str(path))
        if text[start] == "]":
            return rows
        try:
            _, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError) as error:
            raise TesseraError(f"not readable as JSON in row {len(rows) + 1}: {error}", where=str(path)) from None
        byte += len(text[at:start].encode())
        size = len(text[start:end].encode())
        rows.append((byte, size, len(rows) + 1))
        at, byte = end, byte + size


def _skip(text: str, at: int, what: str) -> int:
    while at < len(text) and text[at] in what:
        at += 1
    return at
