"""Has all rows of a set looked at: in this process when that is soon done, otherwise by several.

Rows are looked at in chunks, and each chunk is kept as soon as it is done: whoever is killed loses what was in flight,
and goes on from there. A row that ends the process that reads it, or never lets it go, is a bad row and no more. Clips
and sounds are never looked at in this process, unless no other is allowed: the libraries that read them may crash.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Literal

from tessera.core.errors import TesseraError
from tessera.data.index.measure import Measured, MeasureRows, NeedsProcess, Span
from tessera.data.pool import Lost, Pool

log = logging.getLogger("tessera")

CHUNK = 1024  # rows: some tenths of a second of work
FIRST_CHUNK = 64  # tells how long the others will take
SOON = 3.0  # seconds of work that are not worth starting processes for
MAX_WORKERS = 32
REPORT_EVERY = 10.0  # seconds
Workers = int | Literal["auto"]


def gather(
    work: MeasureRows,
    *,
    workers: Workers,
    title: str,
    look: Callable[[Measured], None] | None = None,
) -> Measured:
    """All rows of `work`, in order. `look` sees what was found as it comes, in order; it may raise."""
    spans = _spans(len(work.rows))
    # Someone began this before and did not come to the end. It may have been a row that killed him: be careful.
    careful = work.folder is not None and work.folder.is_dir()
    known = {span: found for span in spans if (found := work.kept(span)) is not None} if careful else {}
    if work.folder is not None:
        try:
            work.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TesseraError(f"an index cannot be kept: {error}", where=str(work.folder)) from None
    pieces: list[Measured] = []
    progress = _Progress(title, len(work.rows))
    with closing(_run(work, [span for span in spans if span not in known], workers, careful)) as fresh:
        for span in spans:
            old = known.pop(span, None)
            pieces.append(next(fresh) if old is None else old)
            progress.count(span, pieces[-1], fresh=old is None)
            if look is not None:
                look(pieces[-1])
    progress.end()
    return Measured.join(pieces)


def forget(folder: Path | None) -> None:
    """Chunks, once what they were gathered for is safe."""
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _spans(count: int) -> list[Span]:
    starts = [0, *range(FIRST_CHUNK, count, CHUNK)]
    return [Span(first, last) for first, last in zip(starts, [*starts[1:], count], strict=True)]


def _run(work: MeasureRows, spans: Sequence[Span], workers: Workers, careful: bool) -> Generator[Measured]:
    """What is found in each span, in order."""
    if workers == "auto" and spans:
        workers = usable_cpus()
        if not careful:
            here = dataclasses.replace(work, only_images=True)
            with suppress(NeedsProcess):
                began = time.monotonic()
                yield here(spans[0], _nothing)
                seconds = (time.monotonic() - began) / len(spans[0]) * (spans[-1].last - spans[0].last)
                spans = spans[1:]
                while spans and seconds < SOON:
                    yield here(spans[0], _nothing)
                    spans = spans[1:]
    if workers == 0 or not spans:
        yield from (work(span, _nothing) for span in spans)
        return

    assert isinstance(workers, int)
    with Pool(work, min(workers, len(spans)), timeout_s=work.timeout_s) as pool:
        for _, found in pool.map(spans, again=_without_lost):
            if isinstance(found, Lost):
                raise TesseraError(
                    f"the processes that read the data end before they read a row: {found.reason}",
                    where=str(work.source.path),
                    fix="set data.workers=0 to see why",
                )
            yield found


def _nothing(position: int) -> None:
    return


def usable_cpus() -> int:
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cpus, MAX_WORKERS)


def _without_lost(span: Span, lost: Lost) -> Span | None:
    """A row that ended its reader, or never let it go, is a bad row: its span is measured again without it."""
    return None if lost.at is None else span.without(lost.at, lost.reason)


class _Progress:
    def __init__(self, title: str, total: int) -> None:
        self.title, self.total = title, total
        self.done = self.fresh = self.bad = 0
        self.began = self.told = time.monotonic()

    def count(self, span: Span, found: Measured, *, fresh: bool) -> None:
        self.done += len(span)
        self.fresh += len(span) if fresh else 0
        self.bad += found.bad_count
        now = time.monotonic()
        if now - self.told >= REPORT_EVERY:
            self.told = now
            rate = self.fresh / (now - self.began)
            left = f", {_time((self.total - self.done) / rate)} left" if rate else ""
            log.info("%s: %s of %s rows, %s", self.title, f"{self.done:,}", f"{self.total:,}", self._rest(rate) + left)

    def end(self) -> None:
        seconds = time.monotonic() - self.began
        before = f", {self.done - self.fresh:,} of them from an earlier start" if self.done > self.fresh else ""
        rest = self._rest(self.fresh / max(seconds, 1e-6))
        log.info("%s: %s rows in %s%s, %s", self.title, f"{self.total:,}", _time(seconds), before, rest)

    def _rest(self, rate: float) -> str:
        return f"{rate:,.0f} rows/s, {self.bad:,} bad"


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
