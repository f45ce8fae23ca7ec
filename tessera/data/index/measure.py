"""Measure records: tokens and other costs of each sample from media headers, or the reason why it is unusable.

A small data set is measured in the calling process, a large one in worker processes. Each chunk is written to disk at
once, so a killed run loses only the chunks in progress. A record that crashes or hangs its worker counts as bad. Videos
and audio are read in worker processes only, because their libraries may crash; `data.workers=0` is the exception.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from tessera.core.sample import BadSample, MediaSize, Sample, StoredTensors
from tessera.data.media.clips import AudioClip, AudioSamples
from tessera.data.media.files import ArchiveMember, Limits
from tessera.data.media.read import KindTarget, probe
from tessera.data.media.video_frames import VideoSampling
from tessera.data.sources.container import RecordError, bad_sample
from tessera.data.sources.source import Source
from tessera.data.tables import AnyTables, MemoryTables, keep_tables, narrow, open_tables
from tessera.errors import TesseraError
from tessera.runtime.process import usable_cpus
from tessera.runtime.progress import WorkProgress
from tessera.workers.pool import Lost, Note, Pool, no_note
from tessera.workers.worker import TooSlow, time_limit

CHUNK = 1024  # maximum number of rows of a `RecordRange`
FIRST_CHUNK = 64  # rows of the first chunk; its time is used to estimate the time of all chunks
SOON = 3.0  # seconds of work below which no worker process is started
MAX_WORKERS = 32
Workers = int | Literal["auto"]
MAX_BAD = 10_000  # limit of bad rows that are listed with the reason; further ones are only counted
COMMON = ("row", "id_hash", "content")  # arrays that an index has of its samples, in addition to their costs
Measure = Callable[[Sample, Sequence[MediaSize]], dict[str, int]]


class BadRow(NamedTuple):
    row: int
    id: str
    reason: str
    code: str

    @property
    def sample(self) -> BadSample:
        return BadSample(*self[1:])


class NeedsWorkerProcess(Exception):
    """Report a record with video or audio, which must be measured in a worker process: its decoder may crash."""


@dataclass(frozen=True)
class RecordRange:
    """Hold a range [first, last) of record positions. A worker computes the costs of one range at a time."""

    first: int
    last: int
    lost: tuple[tuple[int, str], ...] = ()  # (position, reason) of records that crashed or hung a worker

    def __len__(self) -> int:
        return self.last - self.first

    def without(self, lost: Lost) -> RecordRange | None:
        """Return the range with one more lost record, which crashed or hung its worker and counts as bad."""
        return None if lost.at is None else replace(self, lost=(*self.lost, (lost.at, lost.reason)))


def id_hash(id: str) -> int:
    return int.from_bytes(hashlib.blake2b(id.encode(errors="surrogatepass"), digest_size=8).digest(), "little")


def content_hash(sample: Sample) -> int:
    """Return a hash of roles, texts and media references of a sample."""
    crc, words = 0, []
    for message in sample.messages:
        words.append(message.role)
        for part in message.parts:
            words.append(part.kind)
            value = part.value
            if isinstance(value, AudioClip):
                words.append(value.span)
                value = value.value
            if isinstance(value, bytes):
                crc = zlib.crc32(value, crc)
            elif isinstance(value, str):
                words.append(value)
                words += [repr(region) for region in part.regions]
            elif isinstance(value, StoredTensors):
                words.append(value.content)
            elif part.kind == "codes":
                crc = zlib.crc32(repr(value.shape).encode() + value.tobytes(), crc)
            elif isinstance(value, AudioSamples):
                crc = zlib.crc32(value.mono().tobytes(), crc)
            elif isinstance(value, ArchiveMember):  # do not change "Within(...": hashes in stored indexes depend on it
                member = value
                words.append(
                    f"Within(file={member.file!r}, start={member.start}, size={member.size}, name={member.name!r})"
                )
    return zlib.crc32("\0".join(words).encode(errors="surrogatepass"), crc)


@dataclass(frozen=True)
class Measured:
    """Hold arrays with a value per usable record, and the bad rows.

    Arrays: `row`, `id_hash` and `content` (hashes of the id and the content), `column.*` (tokens and other costs).
    """

    arrays: dict[str, np.ndarray]
    bad: tuple[BadRow, ...] = ()
    bad_count: int = 0
    slow_at: float = 0.0  # time limit in seconds, if a row exceeded it; 0: none did. More time can make the row usable
    crashed: int = 0  # rows that crashed or hung the process that read them

    def tables(self, **about: str) -> MemoryTables:
        words = json.dumps(self.bad).encode()
        facts = {"bad_count": self.bad_count, "slow_at": self.slow_at, "crashed": self.crashed}
        arrays = {**self.arrays, "bad": np.frombuffer(words, dtype=np.uint8)}
        return MemoryTables(arrays, {**{name: str(fact) for name, fact in facts.items()}, **about})

    @staticmethod
    def of(tables: AnyTables) -> Measured:
        """Return the arrays and bad rows in the tables of an index."""
        arrays = {name: array for name, array in tables.items() if name in COMMON or name.startswith("column.")}
        about = tables.about
        return Measured(
            arrays, bad_rows(tables), int(about["bad_count"]), float(about["slow_at"]), int(about["crashed"])
        )

    @staticmethod
    def join(parts: Sequence[Measured]) -> Measured:
        """Concatenate the results of consecutive ranges of records."""
        full = [part.arrays for part in parts if len(part.arrays["row"])] or [parts[0].arrays]
        bad: list[BadRow] = []
        for part in parts:
            bad += part.bad[: MAX_BAD - len(bad)]
        return Measured(
            {name: np.concatenate([arrays[name] for arrays in full]) for name in full[0]},
            tuple(bad),
            sum(part.bad_count for part in parts),
            min((part.slow_at for part in parts if part.slow_at), default=0.0),
            sum(part.crashed for part in parts),
        )


def bad_rows(tables: AnyTables) -> tuple[BadRow, ...]:
    return tuple(BadRow(int(row), *map(str, words)) for row, *words in json.loads(tables["bad"].tobytes()))


def _arrays(usable: Sequence[tuple[int, Sample, dict[str, int]]]) -> dict[str, np.ndarray]:
    rows = [measures for _, _, measures in usable]
    names = sorted(rows[0]) if rows else []
    columns = {f"column.{name}": np.array([measures[name] for measures in rows], dtype=np.int64) for name in names}
    return {
        "row": narrow(np.array([row for row, _, _ in usable], dtype=np.int64)),
        "id_hash": np.array([id_hash(sample.id) for _, sample, _ in usable], dtype=np.uint64),
        "content": np.array([content_hash(sample) for _, sample, _ in usable], dtype=np.uint32),
        **{name: narrow(column) for name, column in columns.items()},
    }


@dataclass(frozen=True, eq=False)
class MeasureRows:
    """Compute the costs of ranges of records, in the processes of a `Pool`. Each finished range is written to disk."""

    source: Source
    rows: range | np.ndarray  # record indices, ascending; a `RecordRange` is a slice of them
    measure: Measure
    limits: Limits
    sampling: VideoSampling
    target: KindTarget
    timeout_s: float
    key: str = ""
    folder: Path | None = None
    only_images: bool = False  # raise `NeedsWorkerProcess` for video and audio, whose decoders may crash

    def __call__(self, part: RecordRange, note: Note) -> Measured:
        usable, bad, slow = [], [], bool(part.lost)
        for row, sample, outcome in self._outcomes(part, note):
            if isinstance(outcome, dict):
                usable.append((row, sample, outcome))
                continue
            slow |= isinstance(outcome, TooSlow)
            id = sample.id if sample else outcome.where if isinstance(outcome, RecordError) else None
            bad.append(BadRow(row, *bad_sample(id or self.source.location(row), outcome)))
        slow_at = self.timeout_s if slow else 0.0
        measured = Measured(_arrays(usable), tuple(bad), len(bad), slow_at, crashed=len(part.lost))
        if self.folder is not None:
            # Writing fails if another process has finished the index and deleted the folder. The result stays valid.
            with suppress(TesseraError):
                keep_tables(self._file(part), measured.tables(key=self._key(part)))
        return measured

    def _outcomes(self, part: RecordRange, note: Note) -> Iterator[tuple[int, Any, dict[str, int] | Exception]]:
        """Yield a tuple for each record: row, sample (None if it is unreadable), and its costs or the error."""
        samples, lost = self._samples(part), dict(part.lost)
        for position in range(part.first, part.last):
            row, sample = int(self.rows[position]), None
            outcome: dict[str, int] | Exception
            if position in lost:
                samples = self._samples(RecordRange(position + 1, part.last))
                yield row, None, RecordError(lost[position], code="data.item-ends-worker")
                continue
            note(position)
            try:
                with time_limit(self.timeout_s):
                    record = next(samples)
                    sample = None if isinstance(record, RecordError) else record
                    outcome = record if isinstance(record, RecordError) else self._cost(record)
            except TooSlow as error:
                if sample is None:  # the interrupted generator cannot continue: read on with a new one
                    samples = self._samples(RecordRange(position + 1, part.last))
                outcome = error
            except (TesseraError, OSError) as error:
                if sample is None:  # the data set cannot be read at all
                    raise
                outcome = error
            yield row, sample, outcome

    def _cost(self, sample: Sample) -> dict[str, int]:
        if self.only_images and any(part.kind in ("video", "audio") for part in sample.media()):
            raise NeedsWorkerProcess
        sizes = [probe(part, self.source.root, self.limits, self.sampling, self.target) for part in sample.media()]
        measures = self.measure(sample, sizes)
        if not measures.get("trained", 1):
            raise RecordError("nothing to train on", code="data.nothing-trained")
        return measures

    def _samples(self, part: RecordRange) -> Iterator[Sample | RecordError]:
        return (sample for _, sample in self.source.scan(self.rows[part.first : part.last]))

    # ------------------------------------------------------------------------------------------ one file per part

    def read_chunk(self, part: RecordRange) -> Measured | None:
        """Return the result of a range that an earlier process wrote to disk.

        None if there is none, or if a row exceeded a time limit shorter than the current one.
        """
        tables = None if self.folder is None else open_tables(self._file(part), self._key(part))
        if tables is None:
            return None
        measured = Measured.of(tables)
        # Copies, so that not thousands of files stay mapped.
        copies = {name: np.array(array) for name, array in measured.arrays.items()}
        return None if 0 < measured.slow_at < self.timeout_s else replace(measured, arrays=copies)

    def _key(self, part: RecordRange) -> str:
        return f"{self.key} {part.first} {part.last}"

    def _file(self, part: RecordRange) -> Path:
        assert self.folder is not None
        return self.folder / f"{part.first:012d}.safetensors"


# ---------------------------------------------------------------------------------------------- all records


def measure_all(
    work: MeasureRows,
    *,
    workers: Workers,
    title: str,
    look: Callable[[Measured], None] | None = None,
) -> Measured:
    """Compute the costs of all records of `work`, in order. `look` gets each chunk, and can stop this by raising."""
    starts = [0, *range(FIRST_CHUNK, len(work.rows), CHUNK)]
    ranges = [RecordRange(*bounds) for bounds in pairwise([*starts, len(work.rows)])]
    # If the folder exists, an earlier run did not finish, perhaps because of a record that crashes its process. Then
    # worker processes are used from the start.
    careful = work.folder is not None and work.folder.is_dir()
    earlier = {part: measured for part in ranges if (measured := work.read_chunk(part)) is not None} if careful else {}
    if work.folder is not None:
        try:
            work.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TesseraError(
                f"the index cannot be written: {error}", where=str(work.folder), code="data.index-not-writable"
            ) from None
    parts: list[Measured] = []
    missing = [part for part in ranges if part not in earlier]
    with (
        closing(_run(work, missing, workers, careful)) as fresh,
        WorkProgress(title, sum(map(len, missing)), "rows") as progress,
    ):
        for part in ranges:
            old = earlier.pop(part, None)
            parts.append(next(fresh) if old is None else old)
            progress.count(len(part) if old is None else 0)
            if look is not None:
                look(parts[-1])
    return Measured.join(parts)


def _run(work: MeasureRows, ranges: Sequence[RecordRange], workers: Workers, careful: bool) -> Generator[Measured]:
    """Measure ranges of records in this process, in worker processes or in both, and yield the results in order."""
    if workers == "auto" and ranges:
        workers = default_workers()
        if not careful:
            here = dataclasses.replace(work, only_images=True)
            with suppress(NeedsWorkerProcess):
                began = time.monotonic()
                yield here(ranges[0], no_note)
                seconds = (time.monotonic() - began) / len(ranges[0]) * (ranges[-1].last - ranges[0].last)
                ranges = ranges[1:]
                while ranges and seconds < SOON:
                    yield here(ranges[0], no_note)
                    ranges = ranges[1:]
    if workers == 0 or not ranges:
        yield from (work(part, no_note) for part in ranges)
        return

    assert isinstance(workers, int)
    with Pool(work, min(workers, len(ranges)), timeout_s=work.timeout_s) as pool:
        for _, measured in pool.map(ranges, again=RecordRange.without):
            if isinstance(measured, Lost):
                raise TesseraError(
                    f"worker processes end before they have read a record: {measured.reason}",
                    where=str(work.source.path),
                    fix="set data.workers=0 to see the error",
                    code="data.workers-end-early",
                )
            yield measured


def default_workers() -> int:
    return max(1, min(int(usable_cpus()), MAX_WORKERS))
