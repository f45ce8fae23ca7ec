"""What the index and the rows know of a data set: rows by number, each a sample."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from tessera.core.types import Sample
from tessera.data.sources.forms import RowError


class Source(Protocol):
    """Rows of one data set. Holds no open file and no row: it travels to worker processes."""

    @property
    def path(self) -> Path:
        """As the recipe gives it: what errors name."""
        ...

    @property
    def root(self) -> Path:
        """Media paths must lie under it."""
        ...

    def __len__(self) -> int: ...

    def place(self, row: int) -> str:
        """Where a row stands, for people: data.jsonl:17."""
        ...

    def read(self, row: int) -> Sample:
        """`RowError` when this row cannot be used; `TesseraError` when the data set cannot."""
        ...

    def scan(self, rows: range) -> Iterator[tuple[int, Sample | RowError]]:
        """Rows in order, each looked at once: cheaper than reading them one by one."""
        ...

    def facts(self) -> dict[str, Any]:
        """JSON that changes whenever the content may have: sizes, times and ends of files. An index is named by it."""
        ...
