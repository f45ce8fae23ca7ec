"""From rows to batches on the device: rows of each rank, worker processes, and copies to the device ahead of use."""

from __future__ import annotations

import itertools
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from tessera.config.run_length import check_batch
from tessera.core.batch import Batch
from tessera.core.row_source import RowSource
from tessera.data.order.packing import split_rows
from tessera.errors import TesseraError, few_names, first_line
from tessera.runtime.device import SideCopies
from tessera.runtime.process import usable_cpus
from tessera.workers.pool import Lost, Note, Pool


class _Copying(NamedTuple):
    batch: Batch
    done: Any  # device event at the end of the copy; None if nothing is copied


class DeviceCopy:
    """Copy batches to the device through page-locked memory, on a separate stream. On a CPU, do nothing."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._copies = None if device is None or device.type == "cpu" else SideCopies(device)

    def start(self, batch: Batch) -> _Copying:
        if self._copies is None or self._device is None:
            return _Copying(batch, None)
        device = self._device
        return _Copying(*self._copies.start(lambda: batch.pin_memory().to(device, non_blocking=True)))

    def finish(self, copying: _Copying) -> Batch:
        """Wait for the copy and return the batch. To be called by the thread that computes."""
        if self._copies is not None:
            bounds = [segments.bounds for segments in copying.batch.segments.values()]
            self._copies.finish(copying.done, [*copying.batch.tensors.values(), *bounds])
        return copying.batch


class Prefetcher:
    """Read batches and copy them to the device in a background thread, at most `depth` batches ahead of use.

    An exception of the background thread is raised by the `__next__` call that would return its batch.
    """

    def __init__(self, batches: Generator[Batch], to_device: DeviceCopy, depth: int) -> None:
        self._batches = batches
        self._to_device = to_device
        self._ready: queue.Queue[_Copying | BaseException | None] = queue.Queue(depth)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tessera-loader", daemon=True)
        self._thread.start()

    def __next__(self) -> Batch:
        ready = self._ready.get()
        if ready is None:
            raise StopIteration
        if isinstance(ready, BaseException):
            raise ready
        return self._to_device.finish(ready)

    def close(self) -> None:
        """End the thread. Stop the pool that makes the batches first: the thread may be waiting for it."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            for batch in self._batches:
                if not self._put(self._to_device.start(batch)):
                    break
            self._batches.close()
            self._put(None)
        except BaseException as error:
            self._put(error)

    def _put(self, item: _Copying | BaseException | None) -> bool:
        while not self._stopped.is_set():
            try:
                self._ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False


WAIT = 0.02  # share of a step's time that is accepted as waiting for data
_WINDOW = 8  # number of steps after which the number of workers is adjusted
_LONG_S = 2.0  # seconds of waiting for data after which the number is adjusted without waiting for `_WINDOW` steps
_WORTH_S = 5.0  # seconds that the first worker processes must save over the run
_UNSETTLED = 2  # steps whose times are ignored at the start and after each change of the number of workers
_WINDOWS = 8  # number of windows after which the number of workers is fixed


class Tuner:
    """Find the best number of worker processes, `workers`, from measured times. It starts at `first`."""

    def __init__(self, cpus: int, micro_batches: int, steps: int | None = None, first: int = 0) -> None:
        self.workers = first
        self.settled = False
        self.batch_seconds = 0.0  # seconds that it takes to make a batch in the training process
        self.step_seconds = 0.0  # time of a step without the wait for data
        self._cpus = max(1, cpus)
        self._micro_batches = micro_batches
        self._steps_left = math.inf if steps is None else float(steps)
        self._windows = 0
        self._unsettled = _UNSETTLED
        self._restart()

    def observe(self, waited: float, elapsed: float) -> None:
        """Record a step. `elapsed`: seconds since the previous step. `waited`: seconds of waiting for data."""
        self._steps_left -= 1
        if self._unsettled and (self.workers or waited < _LONG_S):
            self._unsettled -= 1
            return
        self._steps += 1
        self._waited += waited
        self._elapsed += elapsed
        if self._steps >= _WINDOW or self._waited >= _LONG_S:
            self._decide()

    def _decide(self) -> None:
        waiting = self._waited / self._steps
        computing = max(self._elapsed - self._waited, 1e-9) / self._steps
        if self.workers == 0:
            self.batch_seconds = waiting / self._micro_batches
        self.step_seconds = computing
        too_long = waiting - WAIT * (waiting + computing)
        self._windows += 1
        if (
            too_long <= 0
            or self.workers == self._cpus
            or self._windows == _WINDOWS
            or (self.workers == 0 and too_long * self._steps_left < _WORTH_S)
        ):
            self.settled = True
            return
        if self.workers == 0:
            needed = 1.25 * waiting / computing
        else:  # the worker processes make batches during the whole step: while it waits and while it computes
            needed = self.workers * (waiting + computing) / computing
        self.workers = int(min(self._cpus, max(self.workers + 1, math.ceil(needed))))
        self._unsettled = _UNSETTLED
        self._restart()

    def _restart(self) -> None:
        self._steps, self._waited, self._elapsed = 0, 0.0, 0.0

    def describe(self) -> str:
        count = {0: "no worker processes", 1: "1 worker"}.get(self.workers, f"{self.workers} workers")
        batch = f"a batch takes {_ms(self.batch_seconds)}, " if self.batch_seconds else ""
        return f"loader: {count} ({batch}a step {_ms(self.step_seconds)})"


def workers_per_rank(ranks_here: int = 1) -> int:
    """Return the number of worker processes per rank: its share of the CPUs minus one for the rank, at least 1."""
    return max(1, int(usable_cpus() / ranks_here) - 1)


def _ms(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 0.9995 else f"{seconds * 1e3:.3g} ms"


log = logging.getLogger("tessera")

_ON_DEVICE = 8  # limit of batches that are copied to the device ahead of use

_Item = tuple[list[int], Mapping[int, str]]  # (row indices of a micro-batch, {index of a sample to skip: reason})


class Loader:
    """Yield the micro-batches of this rank on `device`, one list per step, without end.

    Step s has the rows from start_row + s * global_batch on. `split_rows` assigns them to ranks and micro-batches, so
    the rows of a step do not depend on the numbers of ranks, micro-batches and workers. The start is given as a row,
    because a resumed run may have another global batch.

    With workers, at most workers * prefetch batches wait in host memory, and those of one step, at most 8, on the
    device. `workers="auto"` starts without worker processes, and adds some if steps wait for data and enough steps are
    left of `steps` (None: unknown) to gain from them. A source with media starts with one worker, because a decoder
    that crashes would end the run. `prepare` is applied to every batch before the copy to the device. `encode` is
    applied to the batches of `encode_steps` steps at once, on the device.
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
        prepare: Callable[[Batch], Batch] | None = None,
        encode: Callable[[Sequence[Batch]], list[Batch]] | None = None,
        encode_steps: int = 1,
    ) -> None:
        check_batch(global_batch, micro_batch, ranks)
        assert 0 <= rank < ranks
        self.micro_batches = global_batch // (micro_batch * ranks)
        self._tuner: Tuner | None = None
        one_reader = source.sequential
        first = 0
        if workers == "auto":
            workers, first = 0, int(source.decodes_media)
            if not one_reader:
                self._tuner = Tuner(workers_per_rank(ranks_here), self.micro_batches, steps, first)
        processes = min(workers, 1) if one_reader else workers
        self._pool = Pool(partial(_make_batch, source), processes, timeout_s=sample_timeout_s, ahead=prefetch)
        if first:
            self._grow(first)
        rows = _row_lists(source, global_batch, micro_batch, rank, ranks, start_row)
        self._wanted = self._pool.workers
        self._prepare = prepare
        self._encode, self._encode_steps = encode, encode_steps
        self._encoded: list[Batch] = []
        self._steps_left = steps
        self._batches = self._make(rows)
        self._to_device = DeviceCopy(device)
        self._prefetcher = self._start_prefetch() if self._pool.workers else None
        self._last: float | None = None  # time in seconds at which the previous step's batches were returned
        self._closed = False

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> list[Batch]:
        if self._closed:
            raise StopIteration
        began = time.perf_counter()
        try:
            step = self._step()
        except BaseException:
            self.close()
            raise
        now = time.perf_counter()
        if self._tuner is not None:
            waited = now - began  # the computing time of the first step is unknown: assume that it equals the wait
            self._tune(self._tuner, waited, 2 * waited if self._last is None else now - self._last)
        self._last = now
        return step

    def _step(self) -> list[Batch]:
        """Return the micro-batches of the next step. With `encode`, read and encode those of several steps at once."""
        count = self.micro_batches
        if self._encode is None:
            return [self._next() for _ in range(count)]
        if not self._encoded:
            steps_left = self._encode_steps if self._steps_left is None else max(1, self._steps_left)
            steps = min(self._encode_steps, steps_left)  # do not draw batches for steps after the end of the run
            self._encoded = self._encode([self._next() for _ in range(count * steps)])
        if self._steps_left is not None:
            self._steps_left -= 1
        step, self._encoded = self._encoded[:count], self._encoded[count:]
        return step

    def _next(self) -> Batch:
        if self._prefetcher is not None:
            return next(self._prefetcher)
        return self._to_device.finish(self._to_device.start(next(self._batches)))

    def close(self) -> None:
        """End all worker processes, also one that hangs in a decoder."""
        self._closed = True
        self._pool.stop()
        if self._prefetcher is not None:
            self._prefetcher.close()
        self._pool.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------ making batches

    def _make(self, rows: Iterator[list[int]]) -> Generator[Batch]:
        for batch in _batches(self._pool, rows):
            if self._wanted > self._pool.workers:
                self._pool.grow(self._wanted - self._pool.workers)
            yield batch if self._prepare is None else self._prepare(batch)

    def _start_prefetch(self) -> Prefetcher:
        return Prefetcher(self._batches, self._to_device, min(self.micro_batches, _ON_DEVICE))

    def _tune(self, tuner: Tuner, waited: float, elapsed: float) -> None:
        tuner.observe(waited, elapsed)
        if tuner.workers > self._wanted:
            self._wanted = tuner.workers
            if self._prefetcher is None:
                if not self._grow(self._wanted):
                    self._wanted = 0
                    return
                self._prefetcher = self._start_prefetch()
        if tuner.settled:
            log.info("%s", tuner.describe())
            self._tuner = None

    def _grow(self, workers: int) -> bool:
        try:
            self._pool.grow(workers)
        except Exception as error:  # the source cannot be pickled: read it in this process
            log.info("loader: no worker processes: %s", first_line(error))
            self._tuner = None
            return False
        return True


class RowReader:
    """Make batches of given rows, in order, in worker processes that are started at the first call and reused.

    Without workers, or if the source cannot be pickled, batches are made in the calling process.
    """

    def __init__(self, source: RowSource, workers: int, sample_timeout_s: float | None = None) -> None:
        self.source, self.workers, self.sample_timeout_s = source, workers, sample_timeout_s
        self._pool: Pool | None = None

    def batches(self, rows: Iterable[list[int]]) -> Generator[Batch]:
        if self._pool is None:
            self._pool = self._new_pool()
        yield from _batches(self._pool, rows)

    def _new_pool(self) -> Pool:
        work = partial(_make_batch, self.source)
        try:
            return Pool(work, self.workers, timeout_s=self.sample_timeout_s)
        except Exception as error:  # the source cannot be pickled: make batches in this process
            log.info("no worker processes: %s", first_line(error))
            return Pool(work, 0)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        self._pool = None


def _batches(pool: Pool, rows: Iterable[list[int]]) -> Generator[Batch]:
    items: Iterator[_Item] = ((some, {}) for some in rows)
    for item, batch in pool.map(items, _without_lost):
        if isinstance(batch, Lost):
            raise TesseraError(
                f"the batch of rows {few_names([str(row) for row in item[0]])} ended its worker: {batch.reason}",
                where="data",
                fix="set data.workers=0 to see the error, or a lower number to save memory",
                code="data.batch-ends-worker",
            )
        yield batch


def _make_batch(source: RowSource, item: _Item, note: Note) -> Batch:
    """Make one micro-batch. `Pool` calls this in its worker processes."""
    rows, lost = item
    return source.guarded(rows, lost, note)


def _without_lost(item: _Item, lost: Lost) -> _Item | None:
    rows, before = item
    if lost.at is None or lost.at in before:
        return None
    return rows, {**before, lost.at: lost.reason}


def _row_lists(
    source: RowSource, global_batch: int, micro_batch: int, rank: int, ranks: int, start_row: int
) -> Iterator[list[int]]:
    """Yield the row indices of each micro-batch of this rank, without end."""
    for first in itertools.count(start_row, global_batch):
        rows = range(first, first + global_batch)
        for indices in split_rows(source.work(rows), global_batch, ranks, micro_batch)[rank]:
            yield [rows[index] for index in indices]
