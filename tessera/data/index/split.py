"""All usable samples of a split, as the rest of the house reads them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tessera.core.types import Sample
from tessera.data.index.fit import Cut
from tessera.data.index.measure import COMMON, MAX_BAD, bad_rows, content_hash, id_hash
from tessera.data.sources.base import Source
from tessera.data.sources.forms import RowError
from tessera.data.tables import AnyTables, MemoryTables, narrow

Bad = tuple[str, str]  # sample id, why


@dataclass(frozen=True, eq=False)
class SourceIndex:
    """Usable rows of one data set with their measures, and the others with a reason."""

    source: Source
    tables: AnyTables

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def rows(self) -> np.ndarray:
        """Row numbers in `source` of the usable samples, rising."""
        return self.tables["row"]

    @property
    def columns(self) -> dict[str, np.ndarray]:
        """Measures of each usable row, in four or eight bytes each."""
        return {name.removeprefix("column."): t for name, t in self.tables.items() if name.startswith("column.")}

    @property
    def id_hash(self) -> np.ndarray:
        """uint64: finds ids that are given twice, without keeping ids."""
        return self.tables["id_hash"]

    @property
    def bad(self) -> tuple[Bad, ...]:
        """The first of them, in the order of rows; `bad_count` counts all."""
        return tuple((bad.id, bad.reason) for bad in bad_rows(self.tables))

    @property
    def bad_count(self) -> int:
        return int(self.tables.about["bad_count"])

    def read(self, at: int) -> Sample:
        """The sample at a position of `rows`, cut as the index says. `RowError` when it is not the one indexed."""
        row = int(self.rows[at])
        sample = self.source.read(row)
        if id_hash(sample.id) != self.id_hash[at] or content_hash(sample) != self.tables["content"][at]:
            raise RowError(self.source.place(row), "this row changed since it was indexed")
        cuts = self.tables.get("cut.at")
        if cuts is None or len(cuts) == 0:
            return sample
        nth = int(np.searchsorted(cuts, at))
        if nth == len(cuts) or cuts[nth] != at:
            return sample
        return Cut(int(self.tables["cut.messages"][nth]), int(self.tables["cut.characters"][nth]))(sample)


@dataclass(frozen=True, eq=False)
class SplitIndex:
    """All usable samples of a split, in the order of sources and rows."""

    parts: tuple[SourceIndex, ...]
    starts: np.ndarray  # [parts + 1]: number of the first sample of each part
    repeats: AnyTables  # of samples whose id was given before: "sample", rising, and "times" it was
    identity: str  # another one means other samples or measures

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def bad(self) -> tuple[Bad, ...]:
        return tuple(bad for part in self.parts for bad in part.bad)[:MAX_BAD]

    @property
    def bad_count(self) -> int:
        return sum(part.bad_count for part in self.parts)

    def column(self, name: str) -> np.ndarray:
        """One measure of all samples, int64."""
        columns = [part.tables[f"column.{name}"] for part in self.parts if len(part)]
        return np.concatenate(columns, dtype=np.int64)

    def measure(self, name: str, sample: int) -> int:
        """One measure of one sample: from the map, where `column` would bring all into memory."""
        part, at = self._at(sample)
        return int(part.tables[f"column.{name}"][at])

    @property
    def names(self) -> tuple[str, ...]:
        """Of the measures."""
        return tuple(sorted(next(part for part in self.parts if len(part)).columns))

    def locate(self, sample: int) -> tuple[Source, int]:
        """Its data set, and its row there."""
        part, at = self._at(sample)
        return part.source, int(part.rows[at])

    def read(self, sample: int) -> tuple[Sample, Path]:
        """A sample, its id made unique, and the root of its media."""
        part, at = self._at(sample)
        found = part.read(at)
        return Sample(self.unique_id(sample, found.id), found.messages), part.source.root

    def unique_id(self, sample: int, id: str) -> str:
        """Data sets in use repeat ids (several conversations about one picture), so a repeated id is no mistake; it
        gets a suffix, since ledgers and quarantine lists must name one sample."""
        samples = self.repeats["sample"]
        nth = int(np.searchsorted(samples, sample))
        if nth == len(samples) or samples[nth] != sample:
            return id
        return f"{id}~{int(self.repeats['times'][nth]) + 1}"

    def _at(self, sample: int) -> tuple[SourceIndex, int]:
        part = int(np.searchsorted(self.starts, sample, side="right")) - 1
        return self.parts[part], sample - int(self.starts[part])


def find_repeats(hashes: np.ndarray, **about: str) -> MemoryTables:
    """Which samples have the id of an earlier one, and of how many."""
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    begins = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    places = np.arange(len(order))
    times = places - np.maximum.accumulate(np.where(begins, places, 0))
    again = np.flatnonzero(times)
    again = again[np.argsort(order[again])]
    return MemoryTables({"sample": narrow(order[again]), "times": narrow(times[again])}, about)


def sound(tables: AnyTables) -> bool:
    """Whether these can be the tables of a source."""
    try:
        lengths = {len(tables[name]) for name in COMMON}
        lengths |= {len(table) for name, table in tables.items() if name.startswith("column.")}
        cuts = {len(table) for name, table in tables.items() if name.startswith("cut.")}
        bad_rows(tables)
        numbers = [float(tables.about[name]) for name in ("bad_count", "slow_at", "crashed")]
    except (KeyError, ValueError, TypeError):
        return False
    return len(lengths) == 1 and len(cuts) < 2 and min(numbers) >= 0
