"""Deals the rows of a data set out over ranks, micro-batches and worker processes. The order is the source's own."""

from __future__ import annotations

import itertools
import multiprocessing
import signal
import time
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from tessera.core.errors import TesseraError
from tessera.core.types import Batch, RowSource


class Loader:
    """Yields, for each step without end, this rank's micro-batches.

    Micro-batch j of rank r at step s holds the rows from start_row + s * global_batch + (j * ranks + r) * micro_batch
    on, so that any number of ranks, micro-batches or workers together see the same rows at the same step. The start is
    a row and not a step: a run that is resumed with another global batch goes on where it stood.
    """

    def __init__(
        self,
        source: RowSource,
        *,
        global_batch: int,
        micro_batch: int = 1,
        rank: int = 0,
        ranks: int = 1,
        workers: int = 0,
        prefetch: int = 2,
        start_row: int = 0,
        pin: bool = False,
    ) -> None:
        _check_split(global_batch, micro_batch, ranks)
        assert 0 <= rank < ranks
        self.micro_batches = global_batch // (micro_batch * ranks)
        self.wait_seconds = 0.0  # spent in waiting for data since the start
        rows = _RowLists(global_batch, micro_batch, rank, ranks, start_row)
        before = set(multiprocessing.active_children())
        self._batches: Iterator[Batch | TesseraError] | None = iter(
            DataLoader(
                _Batches(source),
                batch_size=None,
                sampler=rows,
                collate_fn=_unchanged,
                num_workers=workers,
                prefetch_factor=prefetch if workers else None,
                worker_init_fn=_begin_worker,
                pin_memory=pin,
            )
        )
        self._workers: list[BaseProcess] = [p for p in multiprocessing.active_children() if p not in before]

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> list[Batch]:
        if self._batches is None:
            raise StopIteration
        began = time.perf_counter()
        step = [self._next() for _ in range(self.micro_batches)]
        self.wait_seconds += time.perf_counter() - began
        return step

    def _next(self) -> Batch:
        assert self._batches is not None
        found = next(self._batches)
        if isinstance(found, TesseraError):
            self.close()
            raise found
        return found

    def close(self) -> None:
        """Ends the workers. A worker that is stuck in a decoder is killed: it ignores politer signals."""
        self._batches = None  # the torch iterator stops its workers when it goes
        for worker in self._workers:
            worker.join(timeout=2)
            if worker.is_alive():
                worker.kill()
                worker.join()
        self._workers = []

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
        f"global_batch {global_batch} does not split into micro-batches of {micro_batch} rows on {ranks} ranks",
        where="train",
        allowed=values,
    )


class _RowLists:
    """Row numbers of one micro-batch after another, without end."""

    def __init__(self, global_batch: int, micro_batch: int, rank: int, ranks: int, start_row: int) -> None:
        self.global_batch, self.micro_batch, self.rank, self.ranks = global_batch, micro_batch, rank, ranks
        self.start_row = start_row

    def __iter__(self) -> Iterator[list[int]]:
        for step_row in itertools.count(self.start_row, self.global_batch):
            for j in range(self.global_batch // (self.micro_batch * self.ranks)):
                first = step_row + (j * self.ranks + self.rank) * self.micro_batch
                yield list(range(first, first + self.micro_batch))


class _Batches(Dataset[Any]):
    def __init__(self, source: RowSource) -> None:
        self.source = source

    def __getitem__(self, rows: Sequence[int]) -> Batch | TesseraError:
        try:
            return self.source.batch(rows)
        except TesseraError as error:
            return error  # as a value: torch rebuilds exceptions from their text, which would lose what a user is told


def _unchanged(batch: Any) -> Any:
    return batch


def _begin_worker(_: int) -> None:
    """A signal to the whole group (Ctrl-C, a scheduler's notice) is the trainer's to answer: it saves, then closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(1)
