"""Read files that somebody else wrote, and keep append-only records of a run.

Of foreign files only regular ones are read, and only so many bytes of them. Records are one JSON object a line. A line
that cannot be read (a torn write, a damaged disk block, an editor) costs that line alone: readers pass over it and say
so. Lines are in the order of their steps, so a resume reads only the end of a long file.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO, TypeVar

from tessera.errors import TesseraError

MAX_JSON_BYTES = 64 << 20
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


def check_regular(path: Path) -> os.stat_result:
    """Return the status of a regular file; raise for a pipe, a device, a socket or a folder: opening one may wait
    for ever. Links are followed; `check_inside` says which may be."""
    try:
        status = path.stat()
    except OSError as error:
        raise TesseraError(
            f"cannot be opened: {error.strerror}", where=str(path), code="environment.cannot-open"
        ) from None
    if not stat.S_ISREG(status.st_mode):
        raise TesseraError(
            f"this is {_kind(status.st_mode)}, not a regular file", where=str(path), code="environment.not-regular-file"
        )
    return status


def leads_out(path: Path, folder: Path) -> bool:
    """Return whether a file of a folder is a link, or lies behind one, that leads out of the folder.

    A cache of downloads is known: the files of its `snapshots/REVISION` are links into `blobs`, beside `snapshots`.
    """
    target, home = (Path(os.path.realpath(place)) for place in (path, folder))  # `resolve` raises for a loop of links
    caches = [above.parent / "blobs" for above in home.parents if above.name == "snapshots"]
    return not any(target.is_relative_to(place) for place in (home, *caches))


def check_inside(path: Path, folder: Path) -> None:
    """Raise if a file of a folder of weights is a link that leads out of the folder."""
    if leads_out(path, folder):
        raise TesseraError(
            f"{path.relative_to(folder)} is a link out of the folder, to {os.path.realpath(path)}",
            where=str(folder),
            fix="copy the file into the folder, or name the folder that it lies in",
            code="weights.link-out-of-folder",
        )


def keep_inside(path: Path) -> None:
    """Prepare a file of a run for writing, so that no file elsewhere is changed. A link, which a foreign folder may
    hold, is replaced by a copy of its target; a pipe or a device is refused."""
    if path.is_symlink():
        if not path.exists():
            path.unlink()
            return
        check_regular(path)
        fresh = path.with_name(f"{path.name}.unlinked")
        fresh.unlink(missing_ok=True)
        shutil.copyfile(path, fresh)
        os.replace(fresh, path)
    elif path.exists():
        check_regular(path)


def read_bytes(path: Path, limit: int = MAX_JSON_BYTES) -> bytes:
    """Return all bytes of a regular file of at most `limit` bytes."""
    check_regular(path)
    try:
        # Without waiting: what lies there may have been exchanged since it was looked at.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise TesseraError(
                    f"this is {_kind(status.st_mode)}, not a regular file",
                    where=str(path),
                    code="environment.not-regular-file",
                )
            if status.st_size > limit:
                raise TesseraError(
                    f"far too large ({status.st_size} bytes)", where=str(path), code="environment.file-too-large"
                )
            return file.read(min(limit, status.st_size + 1))  # reserves so many bytes before it reads any
    except OSError as error:
        raise TesseraError(
            f"cannot be opened: {error.strerror}", where=str(path), code="environment.cannot-open"
        ) from None


def read_text(path: Path, limit: int = MAX_JSON_BYTES) -> str:
    try:
        return read_bytes(path, limit).decode("utf-8")
    except UnicodeDecodeError as error:
        raise TesseraError(f"not text in UTF-8: {error}", where=str(path), code="environment.not-utf8") from None


def read_json(path: Path, limit: int = MAX_JSON_BYTES) -> Any:
    try:
        return json.loads(read_text(path, limit))
    except (ValueError, RecursionError) as error:  # also an integer of thousands of digits
        raise TesseraError(f"not readable as JSON: {error}", where=str(path), code="environment.not-json") from None


def read_json_mapping(path: Path, limit: int = MAX_JSON_BYTES) -> dict[str, Any]:
    data = read_json(path, limit)
    if not isinstance(data, dict):
        raise TesseraError(
            f"a mapping is needed here, this is a {type(data).__name__}",
            where=str(path),
            code="environment.not-a-mapping",
        )
    return data


def refuse_pickle(path: Path) -> None:
    """Raise if a file name is that of a pickle."""
    if path.suffix in PICKLE_SUFFIXES:
        raise TesseraError(
            f"this is a pickle: {path.name}. It can run any program when opened, so it is never read",
            where=str(path),
            fix="convert it to safetensors where you trust it",
            code="weights.pickle-refused",
        )


def _kind(mode: int) -> str:
    for test, name in (
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISCHR, "a device"),
        (stat.S_ISBLK, "a device"),
    ):
        if test(mode):
            return name
    return "something else"


_BLOCK_BYTES = 1 << 16
_log = logging.getLogger("tessera")

Row = dict[str, Any]
T = TypeVar("T")


def parse_row(line: bytes) -> Row | None:
    """Return the object that a line holds; None if it holds none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # not UTF-8, not JSON, an integer of thousands of digits
        return None
    return row if isinstance(row, dict) else None


def step_of(row: Row | None) -> int | None:
    """Return the step of a record's line; None if the line is broken or has none."""
    step = None if row is None else row.get("step")
    return step if isinstance(step, int) and not isinstance(step, bool) and step.bit_length() < 64 else None


def read_jsonl(path: Path) -> Iterator[Row]:
    """Yield the rows of a record (see `parse_lines`); nothing if the file does not exist."""
    yield from read_lines(path, parse_row)


def read_lines(path: Path, parse: Callable[[bytes], T | None]) -> Iterator[T]:
    """Yield the parsed lines of a file (see `parse_lines`); nothing if it does not exist."""
    if path.exists():
        check_regular(path)
        with path.open("rb") as file:
            yield from parse_lines(file, path, parse)


def parse_lines(lines: Iterable[bytes], path: Path, parse: Callable[[bytes], T | None]) -> Iterator[T]:
    """Yield the parsed lines of a record, and log how many cannot be parsed. A last line torn by a kill is skipped."""
    broken = 0
    for line in lines:
        if not line.endswith(b"\n"):
            break
        row = parse(line)
        if row is None:
            broken += 1
        else:
            yield row
    if broken:
        _log.warning("%s: %d lines cannot be read and are skipped", path, broken)


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
    """Remove the rows of steps later than `step`, in place. Only the rows that go are read, and one more."""
    keep_inside(path)
    keep = 0
    for behind, row in rows_from_end(path):
        row_step = step_of(row)
        if row_step is not None and row_step <= step:
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
    """Append rows to a record. The first row opens the file, also after `close`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None

    def write(self, row: Row, flush: bool = True) -> None:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            keep_inside(self.path)
            self._file = self.path.open("a", encoding="utf-8")
            if _ends_torn(self.path):
                self._file.write("\n")  # the next row must not become a part of the torn line
        self._file.write(json.dumps(row) + "\n")
        if flush:
            self._file.flush()

    @property
    def bytes(self) -> int:
        return 0 if self._file is None else self._file.tell()

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def write_jsonl(path: Path, rows: Iterable[Row]) -> None:
    """Write a record anew."""
    path.unlink(missing_ok=True)
    record = JsonLines(path)
    for row in rows:
        record.write(row, flush=False)
    record.close()


def replace_file(path: Path, content: bytes) -> None:
    """Write a file beside its target and put it there in one step, so that no reader sees a part of it."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)  # not through a link that may lie there
    fresh.write_bytes(content)
    os.replace(fresh, path)


def _ends_torn(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
