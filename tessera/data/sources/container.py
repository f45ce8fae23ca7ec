"""Base class of containers: files or folders whose records are read by index, before they are parsed to samples."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from tessera.config.built_ins import FOLDER_NAMES
from tessera.config.registry import Instance, Registry
from tessera.core.sample import BadSample
from tessera.data.media.files import ArchiveMember
from tessera.errors import TesseraError, first_line
from tessera.runtime.files import open_regular

MAX_RECORD_BYTES = 64 << 20  # size limit of a record, which has text and media paths
_HASHED_END_BYTES = 64 << 10


class RecordError(TesseraError):
    """Report an unusable record. `where` is its id, or its location if it has none.

    `data.on_bad_sample` decides whether the run skips it or ends.
    """


def fail(code: str, reason: str, *, where: str | None = None) -> NoReturn:
    """Raise the error for an unusable record. `where`: its location; None: the caller adds it."""
    raise RecordError(reason, where=where, code=code)


def bad_sample(id: str, error: Exception) -> BadSample:
    """Return the entry of a list of bad samples for an error that reading a sample raised."""
    if not isinstance(error, TesseraError):
        error = RecordError(f"the sample is unreadable: {first_line(error)}", code="data.unreadable-sample")
    return BadSample(id, error.what, error.code or "")


def excluded(id: str, reasons: Mapping[str, str]) -> BadSample:
    """Return the entry for a sample that the guard excludes from training. `reasons`: {id: reason}."""
    return bad_sample(id, RecordError(f"excluded: {reasons[id]}", code="data.sample-excluded"))


def bad_sample_error(bad: BadSample, where: str, others: int = 0) -> TesseraError:
    """Return the error for a bad sample under `data.on_bad_sample=fail`."""
    more = f" (and {others} more samples)" if others else ""
    fix = "correct the data, or set data.on_bad_sample=skip"
    return TesseraError(f"unusable sample {bad}{more}", where=where, fix=fix, code="data.bad-sample")


class NothingUsable(TesseraError):
    """Report data without a usable sample."""

    samples = unusable = 0  # number of all samples, and of the unusable ones (samples that are only too long excluded)


class RawRecord(NamedTuple):
    """Hold a record before parsing.

    `members`: media in the archive of the record. A file has an entry for each name that records may use for it.
    """

    content: dict[str, Any]
    members: Mapping[str, ArchiveMember] = {}


class Container(ABC):
    """Read records by index. A container is pickled for worker processes, so it keeps no open file and no record."""

    def __init__(self, name: str, count: int, facts: Any) -> None:
        self.name = name  # file name that `location` writes
        self.count = count
        self.facts = facts  # JSON that changes whenever the content may have changed

    def __len__(self) -> int:
        return self.count

    def location(self, number: int) -> str:
        """Return the location of a record for messages, such as data.jsonl:17."""
        return f"{self.name}:{number + 1}"

    @abstractmethod
    def load(self, number: int) -> RawRecord:
        """Return a record. Raise `RecordError` if the record is unreadable, `TesseraError` if the container is."""

    def scan(self, numbers: range) -> Iterator[tuple[int, RawRecord | RecordError]]:
        """Yield records in order. Subclasses override this if reading in order is faster than `load`."""
        return self.pick(numbers)

    def pick(self, numbers: Iterable[int]) -> Iterator[tuple[int, RawRecord | RecordError]]:
        """Yield any records."""
        for number in numbers:
            try:
                yield number, self.load(number)
            except RecordError as error:
                yield number, error


class Joined(Container):
    """Concatenate several containers."""

    def __init__(self, parts: Sequence[Container]) -> None:
        self.parts = list(parts)
        self.starts = [0, *accumulate(len(part) for part in parts)]
        super().__init__(parts[0].name, self.starts[-1], [part.facts for part in parts])

    def location(self, number: int) -> str:
        part, offset = self._find(number)
        return part.location(offset)

    def load(self, number: int) -> RawRecord:
        part, offset = self._find(number)
        return part.load(offset)

    def scan(self, numbers: range) -> Iterator[tuple[int, RawRecord | RecordError]]:
        assert numbers.step == 1
        for part, start in zip(self.parts, self.starts[:-1], strict=True):
            local = range(max(0, numbers.start - start), min(len(part), numbers.stop - start))
            for offset, record in part.scan(local) if local else ():
                yield start + offset, record

    def _find(self, number: int) -> tuple[Container, int]:
        part = bisect_right(self.starts, number) - 1
        return self.parts[part], number - self.starts[part]


@dataclass(frozen=True)
class FolderReader:
    """Declare a format of folders with a file named `marker`. `open` takes (folder, limit of records or None)."""

    marker: str
    open: Callable[[Path, int | None], Container]


FOLDERS: Registry[FolderReader] = Registry(FOLDER_NAMES, Instance(FolderReader))


def file_facts(path: Path) -> dict[str, Any]:
    """Return path, size, modification time and a hash of both ends of a file. Hashing all bytes would take too long."""
    stat = path.stat()
    ends = hashlib.sha256()
    with open_regular(path) as file:
        ends.update(file.read(_HASHED_END_BYTES))
        file.seek(max(0, stat.st_size - _HASHED_END_BYTES))
        ends.update(file.read(_HASHED_END_BYTES))
    return {"path": str(path.resolve()), "size": stat.st_size, "time": stat.st_mtime_ns, "ends": ends.hexdigest()}
