"""What rows are kept in, before anyone asks how they are spelled."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tessera.data.sources.forms import RowError
from tessera.data.sources.within import Within

MAX_ROW_BYTES = 64 << 20  # one row of text and paths; more than this is not a conversation
_END = 64 << 10


class Raw(NamedTuple):
    """A row as it was found. `inside`: media that the container itself holds, by the names rows may call them."""

    content: dict[str, Any]
    inside: Mapping[str, Within] = {}


class Container(Protocol):
    """Holds no open file and no row: it travels to worker processes."""

    def __len__(self) -> int: ...

    def place(self, row: int) -> str: ...

    def load(self, row: int) -> Raw:
        """`RowError` when this row cannot be read, `TesseraError` when the container cannot."""
        ...

    def scan(self, rows: range) -> Iterator[tuple[int, Raw | RowError]]: ...

    def facts(self) -> Any:
        """JSON that changes whenever the content may have."""
        ...


class Joined:
    """Containers one after another as one."""

    def __init__(self, parts: Sequence[Container]) -> None:
        self.parts = list(parts)
        self.starts = [0, *accumulate(len(part) for part in parts)]

    def __len__(self) -> int:
        return self.starts[-1]

    def _find(self, row: int) -> tuple[Container, int]:
        number = bisect_right(self.starts, row) - 1
        return self.parts[number], row - self.starts[number]

    def place(self, row: int) -> str:
        part, at = self._find(row)
        return part.place(at)

    def load(self, row: int) -> Raw:
        part, at = self._find(row)
        return part.load(at)

    def scan(self, rows: range) -> Iterator[tuple[int, Raw | RowError]]:
        assert rows.step == 1
        for part, start in zip(self.parts, self.starts[:-1], strict=True):
            here = range(max(0, rows.start - start), min(len(part), rows.stop - start))
            for at, raw in part.scan(here) if here else ():
                yield start + at, raw

    def facts(self) -> Any:
        return [part.facts() for part in self.parts]


def file_facts(path: Path) -> dict[str, Any]:
    """Size, time and both ends of a file stand for its content: reading it whole would cost as much as indexing."""
    stat = path.stat()
    ends = hashlib.sha256()
    with path.open("rb") as file:
        ends.update(file.read(_END))
        file.seek(max(0, stat.st_size - _END))
        ends.update(file.read(_END))
    return {"path": str(path.resolve()), "size": stat.st_size, "time": stat.st_mtime_ns, "ends": ends.hexdigest()}
