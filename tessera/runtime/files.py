"""Read untrusted files with limits, and read and write the JSONL files of a run, which are called records.

Only regular files are opened. Files that are read at once have a maximum size. A record has one JSON object per line,
in the order of steps. Readers skip and report a line that cannot be parsed, for example after a power cut. A
resume reads a long record from its end.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TextIO, TypeVar

from tessera.errors import TesseraError

MAX_JSON_BYTES = 64 << 20
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


def check_regular(path: Path) -> os.stat_result:
    """Return the status of a regular file; raise for a pipe, a device, a socket or a folder, whose opening may block.

    Links are followed; see `check_inside`.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise TesseraError(
            f"the file cannot be opened: {error.strerror}", where=str(path), code="environment.cannot-open"
        ) from None
    return _regular(status, path)


def _regular(status: os.stat_result, path: Path) -> os.stat_result:
    if not stat.S_ISREG(status.st_mode):
        raise TesseraError(
            f"{_kind(status.st_mode)} is not a regular file", where=str(path), code="environment.not-regular-file"
        )
    return status


def leads_out(path: Path, folder: Path) -> bool:
    """Return whether the path of a file in a folder contains a link to a place outside of the folder.

    Links of the Hugging Face cache are allowed: files in `snapshots/REVISION` are links into `blobs`.
    """
    # `Path.resolve` raises for a loop of links.
    target, home = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    caches = [above.parent / "blobs" for above in home.parents if above.name == "snapshots"]
    return not any(target.is_relative_to(allowed) for allowed in (home, *caches))


def check_inside(path: Path, folder: Path) -> None:
    """Raise if a file in a folder of weights is a link to a place outside of the folder."""
    if leads_out(path, folder):
        raise TesseraError(
            f"{path.relative_to(folder)} is a link out of the folder, to {os.path.realpath(path)}",
            where=str(folder),
            fix="copy the file into the folder, or use the folder that contains it",
            code="weights.link-out-of-folder",
        )


def keep_inside(path: Path) -> None:
    """Prepare a file of a run for writing: replace a link by a copy of its target, and refuse a pipe or a device.

    A link without a target is removed. A downloaded run folder may contain links to other files of the user.
    """
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


def open_regular(path: Path, buffering: int = -1) -> BinaryIO:
    """Open a regular file for reading. Raise for other files, such as a pipe, whose opening or reading may block."""
    check_regular(path)
    try:
        # O_NONBLOCK: if the file was replaced by a pipe after the check above, opening it must not block.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise TesseraError(
            f"cannot be opened: {error.strerror}", where=str(path), code="environment.cannot-open"
        ) from None
    try:
        _regular(os.fstat(descriptor), path)
        return open(descriptor, "rb", buffering)
    except BaseException:
        os.close(descriptor)
        raise


def read_bytes(path: Path, limit: int = MAX_JSON_BYTES) -> bytes:
    """Return all bytes of a regular file of at most `limit` bytes."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit:
                raise TesseraError(
                    f"the file has {size} bytes; the limit is {limit}",
                    where=str(path),
                    code="environment.file-too-large",
                )
            return file.read(min(limit, size + 1))  # min: `read` allocates as many bytes as its argument
    except OSError as error:
        raise TesseraError(
            f"cannot be opened: {error.strerror}", where=str(path), code="environment.cannot-open"
        ) from None


def read_text(path: Path, limit: int = MAX_JSON_BYTES) -> str:
    try:
        return read_bytes(path, limit).decode("utf-8")
    except UnicodeDecodeError as error:
        raise TesseraError(
            f"the file is not text in UTF-8: {error}", where=str(path), code="environment.not-utf8"
        ) from None


def read_json(path: Path, limit: int = MAX_JSON_BYTES) -> Any:
    try:
        return json.loads(read_text(path, limit))
    except (ValueError, RecursionError) as error:  # ValueError also for an integer of more than 4300 digits
        raise TesseraError(
            f"the file is not readable as JSON: {error}", where=str(path), code="environment.not-json"
        ) from None


def read_json_mapping(path: Path, limit: int = MAX_JSON_BYTES) -> dict[str, Any]:
    data = read_json(path, limit)
    if not isinstance(data, dict):
        raise TesseraError(
            f"the file must contain a mapping, but contains a {type(data).__name__}",
            where=str(path),
            code="environment.not-a-mapping",
        )
    return data


def refuse_pickle(path: Path) -> None:
    """Raise if a file has the suffix of a pickle."""
    if path.suffix in PICKLE_SUFFIXES:
        raise TesseraError(
            f"{path.name} is a pickle, which can run any code when it is loaded",
            where=str(path),
            fix="convert it to safetensors in an environment where you trust it",
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
    """Return the JSON object of a line; None if the line is not a JSON object."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # the line is not UTF-8, not JSON, or has an integer of more than 4300 digits
        return None
    return row if isinstance(row, dict) else None


def step_of(row: Row | None) -> int | None:
    """Return the step of a row; None if the row is missing or has no step."""
    step = None if row is None else row.get("step")
    return step if isinstance(step, int) and not isinstance(step, bool) and step.bit_length() < 64 else None


def read_jsonl(path: Path) -> Iterator[Row]:
    """Yield the JSON objects of a JSONL file; nothing if the file does not exist."""
    yield from read_lines(path, parse_row)


def read_lines(path: Path, parse: Callable[[bytes], T | None]) -> Iterator[T]:
    """Yield the parsed lines of a file; nothing if it does not exist."""
    if path.exists():
        check_regular(path)
        with path.open("rb") as file:
            yield from parse_lines(file, path, parse)


def parse_lines(lines: Iterable[bytes], path: Path, parse: Callable[[bytes], T | None]) -> Iterator[T]:
    """Yield the parsed lines of a file, and log how many cannot be parsed. Skip a last line without a newline."""
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
    """Return the rows of a `metrics.jsonl` that have the keys `kind` and `step`."""
    return [row for row in read_jsonl(path) if "kind" in row and step_of(row) is not None]


def rows_from_end(path: Path) -> Iterator[tuple[int, Row | None]]:
    """Yield (offset of the line's end, row) for each line, from the last to the first.

    The file is read in blocks from its end. A row is None if the line cannot be parsed, or is a last line without a
    newline.
    """
    if not path.exists():
        return
    check_regular(path)
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)  # all bytes after this offset have been read
        behind = end
        rest = b""  # bytes that have been read, but not yielded yet
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
    """Remove the rows of steps after `step` from a JSONL file, in place. Only the end of the file is read."""
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
    """Return the step of the last row for which `wanted` is true; 0 if there is none."""
    for _, row in rows_from_end(path):
        step = step_of(row)
        if row is not None and step is not None and wanted(row):
            return step
    return 0


def finite_json(value: Any) -> Any:
    """Return a JSON value with nan and infinity as text, because JSON lacks them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {key: finite_json(inner) for key, inner in value.items()}
    return [finite_json(inner) for inner in value] if isinstance(value, list) else value


class JsonLines:
    """Append rows to a JSONL file, which is opened when the first row is written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None

    def write(self, row: Row, flush: bool = True) -> None:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            keep_inside(self.path)
            self._file = self.path.open("a", encoding="utf-8")
            if _ends_torn(self.path):
                self._file.write("\n")  # end the incomplete last line of an earlier process
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
    """Replace the content of a JSONL file by these rows. It is not atomic."""
    path.unlink(missing_ok=True)
    record = JsonLines(path)
    for row in rows:
        record.write(row, flush=False)
    record.close()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the name of a temporary file beside `path`, unique among all processes and machines.

    At the end of the `with` block, the temporary file replaces `path`. If the block raises, the file is removed.
    """
    fresh = path.with_name(f"{path.name}.{os.getpid()}-{os.urandom(4).hex()}.part")
    try:
        yield fresh
        os.replace(fresh, path)
    finally:
        with suppress(OSError):  # if both names are links to one file, `os.replace` removes neither
            fresh.unlink(missing_ok=True)


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file atomically: write a temporary file and rename it."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)  # a link with this name would redirect the write
    try:
        fresh.write_bytes(content)
        os.replace(fresh, path)
    except OSError:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise


def _ends_torn(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
