"""Append-only records of a run that survive a kill: one JSON object a line, whole lines only.

A line that cannot be read (a torn write, a damaged disk block, an editor) costs that line and nothing else: readers
pass over it and say so. Rows of a record are in the order of their steps, so the end of a long file is all that a
resume has to look at.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tessera.core.files import check_regular, keep_inside

_BLOCK_BYTES = 1 << 16
_log = logging.getLogger("tessera")

Row = dict[str, Any]


def parse_row(line: bytes) -> Row | None:
    """Return the object that a line holds; None if it holds none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # not UTF-8, not JSON, an integer of thousands of digits
        return None
    return row if isinstance(row, dict) else None


def step_of(row: Row | None) -> int | None:
    """Return the step that a row tells of; None if the row is broken or tells of none."""
    step = None if row is None else row.get("step")
    return step if isinstance(step, int) and not isinstance(step, bool) else None


def read_jsonl(path: Path) -> Iterator[Row]:
    """Yield the rows of a record. Broken lines are counted in a warning; a last line torn by a kill is passed over."""
    if not path.exists():
        return
    check_regular(path)
    broken = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            row = parse_row(line)
            if row is None:
                broken += 1
            else:
                yield row
    if broken:
        _log.warning("%s: %d lines cannot be read and are passed over", path, broken)


def read_metrics(path: Path) -> list[Row]:
    """Return the rows of a `metrics.jsonl`: those that say of which kind and step they are."""
    return [row for row in read_jsonl(path) if "kind" in row and step_of(row) is not None]


def rows_from_end(path: Path) -> Iterator[tuple[int, Row | None]]:
    """Yield (offset behind the line, row) from the last line to the first, reading no more than is asked for. The row
    of a broken line is None, and so is that of a last line without an end."""
    if not path.exists():
        return
    check_regular(path)
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)  # where the bytes begin that were read already
        behind = end
        rest = b""  # the beginning of `rest` may be the middle of a line
        while end > 0 or rest:
            while end > 0 and rest.find(b"\n", 0, -1) < 0:
                size = min(_BLOCK_BYTES, end)
                end -= size
                file.seek(end)
                rest = file.read(size) + rest
            start = rest.rfind(b"\n", 0, -1) + 1
            line, rest = rest[start:], rest[:start]
            yield behind, parse_row(line) if line.endswith(b"\n") else None
            behind -= len(line)


def truncate_after(path: Path, step: int) -> None:
    """Cut off the rows of steps later than `step`, in place. Only the rows that go are read, and one more."""
    keep_inside(path)
    keep = 0
    for behind, row in rows_from_end(path):
        found = step_of(row)
        if found is not None and found <= step:
            keep = behind
            break
    if path.exists() and keep < path.stat().st_size:
        os.truncate(path, keep)


def last_step(path: Path, wanted: Callable[[Row], bool] = lambda row: True) -> int:
    """Return the step of the last row that is wanted; 0 if there is none."""
    for _, row in rows_from_end(path):
        step = step_of(row)
        if row is not None and step is not None and wanted(row):
            return step
    return 0


class JsonLines:
    """A record that is open for appending. `anew`: what it held before is gone."""

    def __init__(self, path: Path, *, anew: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if anew:
            path.unlink(missing_ok=True)
        keep_inside(path)
        self._file = path.open("a", encoding="utf-8")
        if _ends_torn(path):
            self._file.write("\n")  # the next row must not become a part of the torn line

    @property
    def bytes(self) -> int:
        return self._file.tell()

    def write(self, row: Row, flush: bool = True) -> None:
        self._file.write(json.dumps(row) + "\n")
        if flush:
            self._file.flush()

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _ends_torn(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
