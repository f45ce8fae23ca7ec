"""The output file of a batch, and the folder beside it that makes it resumable.

While rows are answered, each rank appends them to a part file in `OUT.parts`. A line of a part file has a checksum, the
index of the row, whether it is an error, and the row. So lines which a kill or a full disk has damaged are recognised,
and their rows are answered again. When all rows are answered, rank 0 writes them in order to OUT.
`OUT.parts/settings.json` remains: it binds the answers to their input and options.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tessera.errors import TesseraError, few_names, with_fix
from tessera.runtime.files import keep_inside, open_regular, read_json_mapping, replace_file
from tessera.runtime.folder_lock import claimed
from tessera.version import __version__

SETTINGS = "settings.json"
_ANSWER, _ERROR = "answer", "error"
_PART = "rank-{:05d}.jsonl"
_OVERWRITE = "name another output file, or add --overwrite (overwrite=True in Python) to answer all rows again"


class BatchOutput:
    """Hold the rows that are answered so far. The main rank creates it by `claimed`, the other ranks by `joined`."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.rows = int(settings["rows"])
        self.began = int(settings["began"])  # time when the output was begun, in seconds since 1970
        self.finished = settings["sha256"] is not None
        self.errors = int(settings["errors"])  # number of rows with an error; known when the output is finished
        self._folder = _folder_of(path)
        self._settings = settings

    @staticmethod
    @contextlib.contextmanager
    def claimed(path: Path, rows: int, facts: Mapping[str, Any], overwrite: bool = False) -> Iterator[BatchOutput]:
        """Lock an output file for this process and continue it, or begin a new one.

        `facts`: JSON of the input and the options. Unless `overwrite`, raise for an output that was begun with other
        facts, for a finished output that was changed, and for a file without the folder of a batch.
        """
        folder = _folder_of(path)
        if path.exists() and not folder.exists() and not overwrite:
            raise TesseraError(f"the file {path} exists", where="--out", fix=_OVERWRITE, code="output.exists")
        with claimed(folder, path):
            yield _continued(path, rows, facts, overwrite)

    @staticmethod
    def joined(path: Path) -> BatchOutput:
        """Return, on another rank, the output that the main rank has claimed."""
        return BatchOutput(path, read_json_mapping(_folder_of(path) / SETTINGS))

    def answered(self) -> np.ndarray:
        """Return a boolean for each row: whether a part file has its answer."""
        return self._lines()[0] >= 0

    def withdraw(self) -> None:
        """Remove the settings of an output without a part file, so that a failed start leaves no files."""
        if not self.finished and not self._parts() and not self.path.exists():
            (self._folder / SETTINGS).unlink(missing_ok=True)

    def part(self, rank: int) -> PartFile:
        """Open the part file of a rank for appending."""
        return PartFile(self._folder / _PART.format(rank))

    def publish(self) -> None:
        """Write all rows in order to the output file, and remove the part files. All rows must be answered."""
        parts, starts = self._parts(), self._lines()
        assert (starts[0] >= 0).all(), "a row is not answered"
        fresh, content, errors = self._folder / "merged.jsonl", hashlib.sha256(), 0
        with _naming(fresh), contextlib.ExitStack() as stack, fresh.open("wb") as file:
            opened = [stack.enter_context(open_regular(part)) for part in parts]
            for part, start in zip(*(array.tolist() for array in starts), strict=True):
                opened[part].seek(start)
                row = _row_of(opened[part].readline())
                assert row is not None, "a part file has changed while it was read"
                file.write(row[2])
                content.update(row[2])
                errors += row[1] == _ERROR
            file.flush()
            os.fsync(file.fileno())
        keep_inside(self.path)
        os.replace(fresh, self.path)
        # Until this line the part files are complete: after a kill, the next process publishes again.
        _write(self._folder, {**self._settings, "errors": errors, "sha256": content.hexdigest()})
        self.finished, self.errors = True, errors
        for part in parts:
            part.unlink()

    def _parts(self) -> list[Path]:
        return sorted(self._folder.glob(_PART.replace("{:05d}", "*")))

    def _lines(self) -> tuple[np.ndarray, np.ndarray]:
        """Return for each row the number of its part file, or -1, and the offset of its line in that file."""
        number, offset = np.full(self.rows, -1, dtype=np.int32), np.zeros(self.rows, dtype=np.int64)
        for part, path in enumerate(self._parts()):
            start = 0
            with open_regular(path) as file:
                for line in file:
                    row = _row_of(line)
                    if row is not None and 0 <= row[0] < self.rows and number[row[0]] < 0:
                        number[row[0]], offset[row[0]] = part, start
                    start += len(line)
        return number, offset


def discard(path: Path) -> None:
    """Remove an output file with the folder beside it."""
    path.unlink(missing_ok=True)
    shutil.rmtree(_folder_of(path), ignore_errors=True)


class PartFile:
    """Append answered rows to the part file of one rank."""

    def __init__(self, path: Path) -> None:
        keep_inside(path)
        self._path = path
        self._file: BinaryIO = path.open("ab", buffering=0)
        if self._file.tell() and not _ends_line(path):
            self._file.write(b"\n")  # end the line that an earlier process did not finish

    def write(self, index: int, row: Mapping[str, Any], *, error: bool = False) -> None:
        """Append a row at once, so that a killed process leaves at most one incomplete line."""
        words = json.dumps(row, ensure_ascii=False)
        # Half of a surrogate pair becomes the escape sequence that JSON has for it.
        content = f"{index} {_ERROR if error else _ANSWER} {words}\n".encode(errors="backslashreplace")
        line = f"{zlib.crc32(content):08x} ".encode() + content
        with _naming(self._path):
            while line:
                line = line[self._file.write(line) :]

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> PartFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _continued(path: Path, rows: int, facts: Mapping[str, Any], overwrite: bool) -> BatchOutput:
    """Continue the output at `path`, or begin one. Unless `overwrite`, raise if it has other facts or was changed."""
    folder = _folder_of(path)
    facts = json.loads(json.dumps(facts))
    settings: Mapping[str, Any] | None = None
    if not overwrite and (folder / SETTINGS).exists():
        with with_fix(str(folder / SETTINGS), _OVERWRITE):
            settings = _checked(read_json_mapping(folder / SETTINGS))
        if settings["facts"] != facts or settings["rows"] != rows:
            raise _other_facts(path, settings["facts"], facts)
        if settings["sha256"] is not None and not path.exists():
            settings = None  # the user has removed the output file: begin again
    if settings is not None and settings["sha256"] is not None and settings["sha256"] != _hash(path):
        raise TesseraError(
            f"{path} was changed after its last row was written",
            where="--out",
            fix=_OVERWRITE,
            code="output.changed",
        )
    # A hash in the settings means that the output file is complete. If part files still exist, a process was killed
    # before it removed them.
    if settings is None or settings["sha256"] is not None:
        for part in folder.glob(_PART.replace("{:05d}", "*")):
            part.unlink()
    if settings is None:  # the answers of an earlier batch remain until those of this batch replace them
        began = int(time.time())
        settings = {"tessera": __version__, "rows": rows, "began": began, "errors": 0, "sha256": None, "facts": facts}
        _write(folder, settings)
    return BatchOutput(path, settings)


def _checked(settings: dict[str, Any]) -> dict[str, Any]:
    types: dict[str, Any] = {"rows": int, "began": int, "errors": int, "sha256": (str, type(None)), "facts": dict}
    if not all(isinstance(settings.get(name, ...), kind) for name, kind in types.items()):
        raise TesseraError("the file does not describe a batch", code="environment.wrong-value-in-file")
    return settings


def _other_facts(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> TesseraError:
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    changes = [
        name if isinstance(now.get(name, before.get(name)), (dict, list)) else f"{name} was {before.get(name)!r}"
        for name in names
    ]
    return TesseraError(
        f"{path} was begun with other settings: {few_names(changes) or 'another number of rows'}",
        where="--out",
        fix=f"run the same command as before to continue it; {_OVERWRITE}",
        code="output.other-settings",
    )


def _folder_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.parts")


def _write(folder: Path, settings: Mapping[str, Any]) -> None:
    with _naming(folder / SETTINGS):
        replace_file(folder / SETTINGS, (json.dumps(settings, indent=1) + "\n").encode())


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Add the file name to errors in the block: if a write fails, as on a full disk, the system names no file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def _row_of(line: bytes) -> tuple[int, str, bytes] | None:
    """Return index, kind and row of a line of a part file, or None if the line is damaged."""
    content = line[9:]
    if not line.endswith(b"\n") or line[:9] != f"{zlib.crc32(content):08x} ".encode():
        return None
    index, kind, row = content.split(b" ", 2)
    return int(index), kind.decode(), row


def _ends_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _hash(path: Path) -> str:
    content = hashlib.sha256()
    with open_regular(path) as file:
        while block := file.read(1 << 20):
            content.update(block)
    return content.hexdigest()
