"""Looks at rows: what will each cost, from headers alone, or why can it not be used."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tessera.core.errors import TesseraError
from tessera.core.types import MediaSize, Sample
from tessera.data.media.images import Limits
from tessera.data.media.read import KindTarget, probe
from tessera.data.media.video import VideoSampling
from tessera.data.pool import Note
from tessera.data.sources.base import Source
from tessera.data.sources.forms import RowError
from tessera.data.sources.within import Within
from tessera.data.tables import AnyTables, MemoryTables, keep_tables, narrow, open_tables
from tessera.data.time_limit import TooSlow, time_limit

MAX_BAD = 10_000  # bad rows that are named; all are counted
COMMON = ("row", "id_hash", "content")  # arrays that every table of samples has, besides its columns
Measure = Callable[[Sample, Sequence[MediaSize]], dict[str, int]]


class BadRow(NamedTuple):
    row: int
    id: str
    reason: str


class NeedsProcess(Exception):
    """A row has media whose readers may crash: it is to be looked at by a process that can be replaced."""


@dataclass(frozen=True)
class Span:
    """Positions [first, last) of the rows of a set: an item of work."""

    first: int
    last: int
    lost: tuple[tuple[int, str], ...] = ()  # positions that cost a process its life, and how: not to be touched again

    def __len__(self) -> int:
        return self.last - self.first

    def without(self, position: int, reason: str) -> Span:
        return Span(self.first, self.last, (*self.lost, (position, reason)))


def id_hash(id: str) -> int:
    return int.from_bytes(hashlib.blake2b(id.encode(errors="surrogatepass"), digest_size=8).digest(), "little")


def content_hash(sample: Sample) -> int:
    """Tells whether a row still says what it said, also where it has no id of its own."""
    crc, words = 0, []
    for message in sample.messages:
        words.append(message.role)
        for part in message.parts:
            words.append(part.kind)
            if isinstance(part.value, bytes):
                crc = zlib.crc32(part.value, crc)
            elif isinstance(part.value, (str, Within)):
                words.append(str(part.value))
    return zlib.crc32("\0".join(words).encode(errors="surrogatepass"), crc)


@dataclass(frozen=True)
class Measured:
    """What was found in some rows: arrays over the usable ones (row, id_hash, content, column.*), and the others."""

    arrays: dict[str, np.ndarray]
    bad: tuple[BadRow, ...] = ()
    bad_count: int = 0
    slow_at: float = 0.0  # seconds after which a row was given up; 0: none was. A longer limit may save it
    crashed: int = 0  # rows that ended the process that read them

    def tables(self, **about: str) -> MemoryTables:
        words = json.dumps(self.bad).encode()
        facts = {"bad_count": self.bad_count, "slow_at": self.slow_at, "crashed": self.crashed}
        arrays = {**self.arrays, "bad": np.frombuffer(words, dtype=np.uint8)}
        return MemoryTables(arrays, {**{name: str(fact) for name, fact in facts.items()}, **about})

    @staticmethod
    def of(tables: AnyTables) -> Measured:
        """Raises ValueError, KeyError or TypeError when the tables are something else."""
        arrays = {name: array for name, array in tables.items() if name in COMMON or name.startswith("column.")}
        if len({len(arrays[name]) for name in (*COMMON, *arrays)}) != 1:
            raise ValueError("columns of different lengths")
        about = tables.about
        return Measured(
            arrays, bad_rows(tables), int(about["bad_count"]), float(about["slow_at"]), int(about["crashed"])
        )

    @staticmethod
    def join(pieces: Sequence[Measured]) -> Measured:
        """Of pieces in the order of their rows."""
        full = [piece.arrays for piece in pieces if len(piece.arrays["row"])] or [pieces[0].arrays]
        bad: list[BadRow] = []
        for piece in pieces:
            bad += piece.bad[: MAX_BAD - len(bad)]
        return Measured(
            {name: np.concatenate([arrays[name] for arrays in full]) for name in full[0]},
            tuple(bad),
            sum(piece.bad_count for piece in pieces),
            min((piece.slow_at for piece in pieces if piece.slow_at), default=0.0),
            sum(piece.crashed for piece in pieces),
        )


def bad_rows(tables: AnyTables) -> tuple[BadRow, ...]:
    return tuple(BadRow(int(row), str(id), str(reason)) for row, id, reason in json.loads(tables["bad"].tobytes()))


@dataclass
class _Found:
    rows: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    contents: list[int] = field(default_factory=list)
    measures: list[dict[str, int]] = field(default_factory=list)

    def arrays(self) -> dict[str, np.ndarray]:
        names = sorted(self.measures[0]) if self.measures else []
        columns = {f"column.{name}": np.array([m[name] for m in self.measures], dtype=np.int64) for name in names}
        return {
            "row": narrow(np.array(self.rows, dtype=np.int64)),
            "id_hash": np.array(self.ids, dtype=np.uint64),
            "content": np.array(self.contents, dtype=np.uint32),
            **{name: narrow(column) for name, column in columns.items()},
        }


@dataclass(frozen=True, eq=False)
class MeasureRows:
    """The pool's work: looks at the rows of a span, and writes down what it found before anyone could be killed."""

    source: Source
    rows: range | np.ndarray  # rising; an item of work is a span of their positions
    measure: Measure
    limits: Limits
    sampling: VideoSampling
    target: KindTarget
    timeout_s: float
    key: str = ""
    folder: Path | None = None
    only_images: bool = (
        False  # in the training process: headers of clips and sounds are read by large foreign libraries
    )

    def __call__(self, span: Span, note: Note) -> Measured:
        found, bad, slow = _Found(), [], bool(span.lost)
        for row, sample, outcome in self._outcomes(span, note):
            if isinstance(outcome, dict):
                found.rows.append(row)
                found.ids.append(id_hash(sample.id))
                found.contents.append(content_hash(sample))
                found.measures.append(outcome)
                continue
            slow |= isinstance(outcome, TooSlow)
            bad.append(BadRow(row, sample.id if sample else self.source.place(row), _reason(outcome)))
        measured = Measured(
            found.arrays(), tuple(bad), len(bad), self.timeout_s if slow else 0.0, crashed=len(span.lost)
        )
        self.keep(span, measured)
        return measured

    def _outcomes(self, span: Span, note: Note) -> Iterator[tuple[int, Any, dict[str, int] | Exception | str]]:
        """(row, its sample or whatever has its id, measures or why not) for each row."""
        samples, lost = self._samples(span), dict(span.lost)
        for position in range(span.first, span.last):
            row, sample = int(self.rows[position]), None
            if position in lost:
                samples = self._samples(Span(position + 1, span.last))
                yield row, None, lost[position]
                continue
            note(position)
            outcome: dict[str, int] | Exception | str
            try:
                with time_limit(self.timeout_s):
                    sample = next(samples)
                    outcome = sample if isinstance(sample, RowError) else self._cost(sample)
            except TooSlow as error:
                if sample is None:  # the reader was torn out of its work: another one goes on behind this row
                    samples = self._samples(Span(position + 1, span.last))
                outcome = error
            except (TesseraError, OSError) as error:
                if sample is None:  # not this row but the whole set
                    raise
                outcome = error
            yield row, sample, outcome

    def _cost(self, sample: Sample) -> dict[str, int] | str:
        if self.only_images and any(part.kind != "image" for part in sample.media()):
            raise NeedsProcess
        sizes = [probe(part, self.source.root, self.limits, self.sampling, self.target) for part in sample.media()]
        measures = self.measure(sample, sizes)
        return measures if measures.get("trained", 1) else "nothing to train on"

    def _samples(self, span: Span) -> Iterator[Sample | RowError]:
        rows = self.rows[span.first : span.last]
        if isinstance(rows, range):
            yield from (sample for _, sample in self.source.scan(rows))
            return
        for row in rows.tolist():
            try:
                yield self.source.read(row)
            except RowError as error:
                yield error

    # ------------------------------------------------------------------------------------------ one file per span

    def keep(self, span: Span, measured: Measured) -> None:
        if self.folder is not None:
            # Not kept is only measured again: another process may have finished, and have taken the folder away.
            with suppress(TesseraError):
                keep_tables(self._file(span), measured.tables(key=self._key(span)))

    def kept(self, span: Span) -> Measured | None:
        """What an earlier process found; None when it did not come so far."""
        tables = None if self.folder is None else open_tables(self._file(span), self._key(span))
        if tables is None:
            return None
        try:
            measured = Measured.of(tables)
        except (ValueError, KeyError, TypeError):
            return None
        copies = {name: np.array(array) for name, array in measured.arrays.items()}  # not thousands of open maps
        return None if 0 < measured.slow_at < self.timeout_s else replace(measured, arrays=copies)

    def _key(self, span: Span) -> str:
        return f"{self.key} {span.first} {span.last}"

    def _file(self, span: Span) -> Path:
        assert self.folder is not None
        return self.folder / f"{span.first:012d}.safetensors"


def _reason(outcome: Exception | str) -> str:
    if isinstance(outcome, TesseraError):
        return outcome.what
    return outcome.reason if isinstance(outcome, RowError) else str(outcome)
