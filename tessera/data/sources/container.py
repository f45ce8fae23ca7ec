"""The base of what holds the records of a data set: a class per kind of file, before records are parsed to samples."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from tessera.config.built_ins import FOLDER_NAMES
from tessera.config.registry import Instance, Registry
from tessera.data.media.files import ArchiveMember
from tessera.errors import TesseraError, first_line

MAX_RECORD_BYTES = 64 << 20  # one record of text and paths; more than this is not a conversation
_HASHED_END_BYTES = 64 << 10


class RecordError(Exception):
    """Report a record that cannot be used; `data.on_bad_sample` states whether the run skips it or ends."""

    def __init__(self, id: str, reason: str) -> None:
        super().__init__(f"{id}: {reason}")
        self.id = id
        self.reason = reason

    def __reduce__(self) -> tuple[object, ...]:
        return (RecordError, (self.id, self.reason))


def reason_of(error: Exception) -> str:
    """Return why something cannot be used, in one line."""
    if isinstance(error, RecordError):
        return error.reason
    return error.what if isinstance(error, TesseraError) else first_line(error)


def bad_sample_error(id: str, reason: str, where: str, others: int = 0) -> TesseraError:
    """Return what ends a run whose policy is not to skip bad samples."""
    more = f" (and {others} more)" if others else ""
    fix = "mend the data, or set data.on_bad_sample=skip"
    return TesseraError(f"sample {id} cannot be used: {reason}{more}", where=where, fix=fix, code="data.bad-sample")


class NothingUsable(TesseraError):
    """Report data without a sample to train on."""

    samples = unusable = 0  # all, and those that are bad for another reason than their length


class RawRecord(NamedTuple):
    """Hold a record as it was found. `members`: media in the same archive, by each name that a record may call them."""

    content: dict[str, Any]
    members: Mapping[str, ArchiveMember] = {}


class Container(ABC):
    """Read records by number. A container is pickled for workers, so it holds no open file and no record."""

    def __init__(self, name: str, count: int, facts: Any) -> None:
        self.name = name  # what locations are called by
        self.count = count
        self.facts = facts  # JSON that changes whenever the content may have changed

    def __len__(self) -> int:
        return self.count

    def location(self, number: int) -> str:
        """Return where a record stands, for people: data.jsonl:17."""
        return f"{self.name}:{number + 1}"

    @abstractmethod
    def load(self, number: int) -> RawRecord:
        """Return a record. Raise `RecordError` if it cannot be read, `TesseraError` if the container cannot."""

    def scan(self, numbers: range) -> Iterator[tuple[int, RawRecord | RecordError]]:
        """Yield records in order. Containers for which reading in order is cheaper than `load` override this."""
        for number in numbers:
            try:
                yield number, self.load(number)
            except RecordError as error:
                yield number, error


class Joined(Container):
    """Join several containers, one after another, into one."""

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
    """Open a folder in a format of its own, which has a file with the name `marker`. `open`: (folder, limit on the
    number of records or None)."""

    marker: str
    open: Callable[[Path, int | None], Container]


FOLDERS: Registry[FolderReader] = Registry(FOLDER_NAMES, Instance(FolderReader))


def file_facts(path: Path) -> dict[str, Any]:
    """Return size, time and a hash of both ends of a file: reading all of it would cost as much as indexing."""
    stat = path.stat()
    ends = hashlib.sha256()
    with path.open("rb") as file:
        ends.update(file.read(_HASHED_END_BYTES))
        file.seek(max(0, stat.st_size - _HASHED_END_BYTES))
        ends.update(file.read(_HASHED_END_BYTES))
    return {"path": str(path.resolve()), "size": stat.st_size, "time": stat.st_mtime_ns, "ends": ends.hexdigest()}
