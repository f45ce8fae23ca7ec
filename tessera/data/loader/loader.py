"""Deals the rows of a data set out over ranks, micro-batches and worker processes. The order is the source's own."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Literal

import torch

from tessera.core.errors import TesseraError, first_line
from tessera.core.types import Batch, GuardedRows, RowSource, WeighedRows
from tessera.data.loader.deal import deal
from tessera.data.loader.prefetch import Ahead, ToDevice
from tessera.data.loader.tune import Tuner, usable_cpus
from tessera.data.pool import Lost, Note, Pool

log = logging.getLogger("tessera")

_ON_DEVICE = 8  # batches of the next step that are on the device before it begins, at most

_Item = tuple[list[int], Mapping[int, str]]  # rows of a micro-batch; samples to leave out, with the reason


class Loader:
    """Yields, for each step without end, this rank's micro-batches, on `device`.

    Step s has the rows from start_row + s * global_batch on; `deal` says which rank computes which of them, and in
    which micro-batch. So any number of ranks, micro-batches or workers together see the same rows at the same step. The
    start is a row and not a step: a run that is resumed with another global batch goes on where it stood.

    With workers, at most workers * prefetch batches wait in host memory, and one step's, 8 at most, on the device;
    nothing more is read until one is taken. `workers="auto"` begins without processes and adds them as the wait for
    data asks for; `steps`, if known, tells how much there is to gain. A source that decodes media has a process from
    the beginning: a decoder that crashes must not take the run along.
    """

    def __init__(
        self,
        source: RowSource,
        *,
        global_batch: int,
        micro_batch: int = 1,
        rank: int = 0,
        ranks: int = 1,
        workers: int | Literal["auto"] = 0,
        prefetch: int = 2,
        start_row: int = 0,
        device: torch.device | None = None,
        sample_timeout_s: float | None = None,
        steps: int | None = None,
        ranks_here: int = 1,
    ) -> None:
        _check_split(global_batch, micro_batch, ranks)
        assert 0 <= rank < ranks
        self.micro_batches = global_batch // (micro_batch * ranks)
        self.wait_seconds = 0.0  # spent in waiting for data since the start
        self._tuner: Tuner | None = None
        one_reader = getattr(source, "in_order", False)  # rows that only go forward
        first = 0
        if workers == "auto":
            workers, first = 0, int(decodes_media(source))
            if not one_reader:
                self._tuner = Tuner(usable_cpus(ranks_here), self.micro_batches, steps, first)
        processes = min(workers, 1) if one_reader else workers
        self._pool = Pool(_Making(source), processes, timeout_s=sample_timeout_s, ahead=prefetch)
        if first:
            self._grow(first)
        rows = _row_lists(source, global_batch, micro_batch, rank, ranks, start_row)
        self._wanted = self._pool.workers
        self._made = self._make(rows, isinstance(source, GuardedRows))
        self._to_device = ToDevice(device)
        self._ahead = self._go_ahead() if self._pool.workers else None
        self._last: float | None = None  # when the last step was given
        self._closed = False

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> list[Batch]:
        if self._closed:
            raise StopIteration
        began = time.perf_counter()
        try:
            step = [self._next() for _ in range(self.micro_batches)]
        except BaseException:
            self.close()
            raise
        now = time.perf_counter()
        self.wait_seconds += now - began
        if self._tuner is not None:
            waited = now - began  # how long the first step computes is not known yet: as long as it waits, say
            self._tune(self._tuner, waited, 2 * waited if self._last is None else now - self._last)
        self._last = now
        return step

    def _next(self) -> Batch:
        if self._ahead is not None:
            return next(self._ahead)
        return self._to_device.finish(self._to_device.start(next(self._made)))

    def close(self) -> None:
        """Ends the workers, also one that is stuck in a decoder."""
        self._closed = True
        self._pool.stop()
        if self._ahead is not None:
            self._ahead.close()
        self._pool.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------ making batches

    def _make(self, rows: Iterator[list[int]], guarded: bool) -> Generator[Batch]:
        for made in _batches(self._pool, rows, guarded):
            if self._wanted > self._pool.workers:
                self._pool.grow(self._wanted - self._pool.workers)
            yield made

    def _go_ahead(self) -> Ahead:
        return Ahead(self._made, self._to_device, min(self.micro_batches, _ON_DEVICE))

    def _tune(self, tuner: Tuner, waited: float, elapsed: float) -> None:
        tuner.saw(waited, elapsed)
        if tuner.workers > self._wanted:
            self._wanted = tuner.workers
            if self._ahead is None and not self._begin_workers():
                return
        if tuner.settled:
            log.info("%s", tuner.describe())
            self._tuner = None

    def _begin_workers(self) -> bool:
        if not self._grow(self._wanted):
            self._wanted = 0
            return False
        self._ahead = self._go_ahead()
        return True

    def _grow(self, workers: int) -> bool:
        try:
            self._pool.grow(workers)
        except Exception as error:  # of a class that only this process knows, say: such data is read here
            log.info("loader: no worker processes: %s", first_line(error))
            self._tuner = None
            return False
        return True


def decodes_media(source: RowSource) -> bool:
    """Whether rows of this source are made by decoders, which may crash: it says so itself, or does not."""
    return bool(getattr(source, "decodes_media", False))


class ReadApart:
    """Batches of any rows, in the order asked for, made by processes that are begun when they are first needed and then
    kept. With no workers, or where the source cannot be handed to another process, they are made in this one."""

    def __init__(self, source: RowSource, workers: int, sample_timeout_s: float | None = None) -> None:
        self.source, self.workers, self.sample_timeout_s = source, workers, sample_timeout_s
        self._pool: Pool | None = None

    def batches(self, rows: Iterable[list[int]]) -> Generator[Batch]:
        if self._pool is None:
            self._pool = self._new_pool()
        yield from _batches(self._pool, rows, isinstance(self.source, GuardedRows))

    def _new_pool(self) -> Pool:
        work = _Making(self.source)
        try:
            return Pool(work, self.workers, timeout_s=self.sample_timeout_s)
        except Exception as error:  # as in `Loader`
            log.info("no worker processes: %s", first_line(error))
            return Pool(work, 0)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        self._pool = None


def _batches(pool: Pool, rows: Iterable[list[int]], guarded: bool) -> Generator[Batch]:
    items: Iterator[_Item] = ((some, {}) for some in rows)
    for item, made in pool.map(items, _without_lost if guarded else None):
        if isinstance(made, Lost):
            raise TesseraError(
                f"a batch of rows {_few(item[0])} could not be made: {made.reason}",
                where="data",
                fix="set data.workers=0 to see where; fewer workers need less memory",
            )
        yield made


class _Making:
    """What a worker does."""

    def __init__(self, source: RowSource) -> None:
        self.source = source

    def __call__(self, item: _Item, note: Note) -> Batch:
        rows, lost = item
        if isinstance(self.source, GuardedRows):
            return self.source.guarded(rows, lost, note)
        return self.source.batch(rows)


def _without_lost(item: _Item, lost: Lost) -> _Item | None:
    rows, known = item
    if lost.at is None or lost.at in known:
        return None
    return rows, {**known, lost.at: lost.reason}


def _row_lists(
    source: RowSource, global_batch: int, micro_batch: int, rank: int, ranks: int, start_row: int
) -> Iterator[list[int]]:
    """Row numbers of one micro-batch after another, without end."""
    for first in itertools.count(start_row, global_batch):
        rows = range(first, first + global_batch)
        work = source.work(rows) if isinstance(source, WeighedRows) else None
        for places in deal(work, global_batch, ranks, micro_batch)[rank]:
            yield [rows[place] for place in places]


def _few(rows: Sequence[int]) -> str:
    return ", ".join(map(str, rows[:8])) + (", ..." if len(rows) > 8 else "")


def _check_split(global_batch: int, micro_batch: int, ranks: int) -> None:
    if global_batch % (micro_batch * ranks) == 0:
        return
    if global_batch % ranks:
        above = -(-global_batch // (micro_batch * ranks)) * micro_batch * ranks
        below = above - micro_batch * ranks
        values = [f"global_batch={value}" for value in (below, above) if value]
    else:
        share = global_batch // ranks
        values = [f"micro_batch={m}" for m in range(1, share + 1) if share % m == 0]
    raise TesseraError(
        f"global_batch {global_batch} does not split over {ranks} ranks with micro_batch {micro_batch}",
        where="train",
        allowed=values,
        fix="take one of these, or let several ranks share a row: parallel.tp, parallel.cp or parallel.pp",
    )
