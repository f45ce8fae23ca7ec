"""Make the index of a split: the number of tokens of every sample, and the samples that are unusable.

An index is a file whose name is a hash of all inputs: records, media root and preprocessing. A run stores it in its run
folder and copies it to the user's cache for other runs. Only headers of media are read, never pixels. If a media file
is replaced later, its sample has another length than the index when it is decoded, and counts as bad. Before a run uses
an index of the cache, it measures some samples again and compares.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from tessera.config.run_config import SourceSection
from tessera.core.sample import count_codes
from tessera.data.bad_share import check_measured, doctor_command
from tessera.data.cache import adopt, digest_of
from tessera.data.index.measure import COMMON, Measured, MeasureRows, Workers, bad_rows, measure_all
from tessera.data.index.split import (
    SourceIndex,
    SplitIndex,
    Truncate,
    TruncateToLength,
    drop_long,
    find_repeats,
    too_long,
    with_cuts,
)
from tessera.data.media.files import Limits
from tessera.data.media.read import MediaProcessor
from tessera.data.sources.container import NothingUsable, bad_sample_error
from tessera.data.sources.source import Source, open_source
from tessera.data.tables import AnyTables, MemoryTables, keep_tables, open_tables
from tessera.errors import TesseraError

log = logging.getLogger("tessera")

FORMAT = 5  # version of index files: increase it when their layout or their meaning changes
Policy = Literal["skip", "fail"]
_CONTENT = "content_hash"
# Before a cached index is used, at most this many usable and as many unusable samples are read again and compared.
_COMPARED = 256
_NOT_MEASURED = ("jpeg_draft",)  # fields of `Limits` that are not in an index's hash: they do not change its content


@dataclass(frozen=True)
class IndexMaker:
    """Make the index of a split, or of one of its data sets."""

    processor: MediaProcessor
    length: int
    limits: Limits
    on_bad_sample: Policy  # what to do with unusable or too long samples: skip and list them, or raise
    cache_folder: Path | None
    truncate: Truncate = "never"
    # processes that read records; 0: the calling process; auto: the calling process if that takes only a few seconds
    workers: Workers = "auto"
    timeout_s: float = 60.0
    max_bad_share: float = 1.0  # raise if a larger share of a data set is unusable

    def index(self, sections: Sequence[SourceSection]) -> SplitIndex:
        """Return the index of a split. Raise if no sample is usable."""
        if not sections:
            raise TesseraError(
                "no data files are given", where="data", fix="list them under data.train", code="data.no-files"
            )
        parts = tuple(self.part(section) for section in sections)
        starts = np.cumsum([0, *(len(part) for part in parts)])
        if starts[-1] == 0:
            count = sum(part.bad_count for part in parts)
            reasons = [f"\n    {bad}" for part in parts for bad in part.bad[:5]]
            nothing = NothingUsable(
                f"none of the {count} samples is usable; the first reasons:{''.join(reasons[:5])}",
                where=", ".join(str(section.path) for section in sections),
                fix=f"{doctor_command(sections)} lists all reasons",
                code="data.no-usable-sample",
            )
            nothing.samples = sum(len(part.source) for part in parts)
            nothing.unusable = sum(part.unusable_count for part in parts)
            raise nothing
        identity = digest_of([[part.tables.about["key"], part.tables.about["digest"]] for part in parts])
        content = digest_of([self.processor.fingerprint, *(_content(part.tables) for part in parts)])
        return SplitIndex(parts, starts, self._repeats(parts, identity), identity, content)

    def part(self, section: SourceSection) -> SourceIndex:
        source = open_source(section, self.cache_folder)
        work = MeasureRows(
            source,
            range(len(source)),
            self.processor.measure,
            self.limits,
            self.processor.sampling,
            self.processor.target,
            self.timeout_s,
        )
        tables = self._measured(work)
        self._check_bad(source, tables)
        bad = int(tables.about["bad_count"])
        check_measured(bad, len(source), self.max_bad_share, [section], [row.sample for row in bad_rows(tables)[:3]])
        part = SourceIndex(source, self._fitted(work, tables))
        self._check_bad(source, part.tables)
        return part

    def _measured(self, work: MeasureRows) -> AnyTables:
        """Return the tables of token counts and media sizes of all usable samples, including those longer than a row.

        They are read from a stored index if there is one.
        """
        limits = {name: value for name, value in dataclasses.asdict(self.limits).items() if name not in _NOT_MEASURED}
        key = digest_of([FORMAT, work.source.facts(), self.processor.fingerprint, limits])
        file = self._file("index", key)
        tables = self._read(file, key)
        if tables is None and file is not None and adopt(file):
            tables = self._read(file, key)
            tables = tables if tables is not None and self._still_holds(work, tables) else None
        if tables is not None:
            return tables

        def fail_early(measured: Measured) -> None:
            if measured.bad and self.on_bad_sample == "fail":
                raise bad_sample_error(measured.bad[0].sample, str(work.source.path))

        work = dataclasses.replace(work, key=key, folder=None if file is None else file.with_suffix(".parts"))
        measured = measure_all(work, workers=self.workers, title=f"index of {work.source.path.name}", look=fail_early)
        if measured.bad_count:
            codes = count_codes(bad.code for bad in measured.bad)
            log.info("index of %s: %d samples cannot be used (%s)", work.source.path.name, measured.bad_count, codes)
        if measured.crashed:
            log.warning(
                "%s: %d rows crashed or hung the process that read them and count as bad%s",
                work.source.path.name,
                measured.crashed,
                "" if file is None else f" until {file} is deleted",
            )
        return self._write(file, key, measured.tables(), work.folder)

    def _still_holds(self, work: MeasureRows, tables: AnyTables) -> bool:
        """Read some samples again, because media files can change. Return whether they agree with a cached index."""
        usable, unusable = np.asarray(tables["row"]), np.array([row.row for row in bad_rows(tables)], dtype=np.int64)
        rows = np.unique(np.concatenate([_spread(usable), _spread(unusable)]))
        some = dataclasses.replace(work, rows=rows)
        again = measure_all(some, workers=self.workers, title=work.source.path.name).arrays
        at = np.flatnonzero(np.isin(usable, rows))
        same = len(at) == len(again["row"]) and all(np.array_equal(tables[n][at], again[n]) for n in again if len(at))
        how = "taken from the cache" if same else "measured again: media files have changed since it was made"
        log.info("index of %s: %s", work.source.path.name, how)
        return same

    def _fitted(self, work: MeasureRows, tables: AnyTables) -> AnyTables:
        """Return the tables of the samples that fit into a row. Longer samples are truncated or dropped."""
        long = too_long(tables, self.length)
        if len(long) == 0:
            return tables
        name = work.source.path.name
        measured = [tables.about["key"], tables.about["digest"]]
        key = hashlib.sha256(f"{measured} fit to {self.length} by {self.truncate}".encode()).hexdigest()
        file = self._file("fit", key)
        fitted = self._read(file, key)
        if fitted is None and file is not None and adopt(file):
            fitted = self._read(file, key)
        if fitted is None:
            parts = None if file is None or self.truncate == "never" else file.with_suffix(".parts")
            if self.truncate == "never":
                cut = drop_long(tables, work.source, long, self.length)
            else:
                truncate, rows = TruncateToLength(self.processor, self.length), np.asarray(tables["row"][long])
                work = dataclasses.replace(work, rows=rows, measure=truncate, key=key, folder=parts)
                cut = measure_all(work, workers=self.workers, title=f"long samples of {name}")
            fitted = self._write(file, key, with_cuts(Measured.of(tables), cut, long), parts)
        log.info(
            "%s: of the samples longer than data.length %d, %s were truncated, %s were dropped",
            *(name, self.length, fitted.about["cut"], fitted.about["dropped"]),
        )
        return fitted

    def _repeats(self, parts: Sequence[SourceIndex], identity: str) -> AnyTables:
        """Return a table of the samples whose id an earlier sample of the split also has."""
        file = self._file("ids", identity)
        tables = None if file is None else open_tables(file, identity)
        if tables is not None:
            return tables
        hashes = np.concatenate([part.tables["id_hash"] for part in parts])
        return keep_tables(file, find_repeats(hashes, key=identity))

    def _file(self, kind: str, key: str) -> Path | None:
        return None if self.cache_folder is None else self.cache_folder.absolute() / f"{kind}-{key[:32]}.safetensors"

    def _read(self, file: Path | None, key: str) -> AnyTables | None:
        """Return the tables in a file; None if the file is missing, damaged, or was made with a shorter time limit."""
        tables = None if file is None else open_tables(file, key)
        return None if tables is None or 0 < float(tables.about["slow_at"]) < self.timeout_s else tables

    def _write(self, file: Path | None, key: str, tables: MemoryTables, parts: Path | None) -> AnyTables:
        digest = _hash(tables, ("row", "column.tokens"))
        tables.about |= {"key": key, "digest": digest, _CONTENT: _content(tables)}
        mapped = keep_tables(file, tables, shared=True)
        if parts is not None:
            shutil.rmtree(parts, ignore_errors=True)
        return mapped

    def _check_bad(self, source: Source, tables: AnyTables) -> None:
        count = int(tables.about["bad_count"])
        if self.on_bad_sample == "fail" and count:
            raise bad_sample_error(bad_rows(tables)[0].sample, str(source.path), count - 1)


def _content(tables: AnyTables) -> str:
    """Return a hash of the samples and their lengths, without the paths of their files."""
    return tables.about.get(_CONTENT) or _hash(tables, (*COMMON, "column.tokens"))


def _hash(tables: AnyTables, names: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for name in names:
        digest.update(np.ascontiguousarray(tables.get(name, np.empty(0, np.int32))).data)
    return digest.hexdigest()


def _spread(rows: np.ndarray) -> np.ndarray:
    """Return at most 256 (`_COMPARED`) evenly spaced entries of `rows`."""
    return rows[np.linspace(0, len(rows) - 1, min(len(rows), _COMPARED)).astype(np.int64)]
