"""Run a function on one rank or on all ranks, and return its result or raise its error on every rank.

A failure on one rank must never leave the other ranks waiting in a collective. So functions that can fail run inside
`on_rank0` or `on_all`, which gather all outcomes first and then raise the same error on every rank.
"""

from __future__ import annotations

import datetime
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch.distributed as dist

from tessera.errors import TesseraError

T = TypeVar("T")
U = TypeVar("U")
_THREAD_TIMEOUT = datetime.timedelta(hours=2)  # time that a rank waits for the slowest rank


@dataclass(frozen=True)
class Failure:
    """Hold an error to send to other ranks: its traceback, and the exception if it is a `TesseraError` or `OSError`."""

    rank: int
    error: TesseraError | OSError | None
    text: str

    @staticmethod
    def of(error: BaseException, rank: int) -> Failure:
        portable = error if isinstance(error, (TesseraError, OSError)) else None
        return Failure(rank, portable, "".join(traceback.format_exception(error)))


class CollectiveError(RuntimeError):
    """Report on every rank that some ranks failed with an exception other than `TesseraError`."""

    def __init__(self, failures: list[Failure]) -> None:
        self.failures = failures
        super().__init__("\n".join(f"[rank {f.rank}] {f.text}" for f in failures))


def raise_together(failures: list[Failure]) -> None:
    """Raise the first `TesseraError` of these failures; otherwise raise a `CollectiveError` that names the ranks."""
    if not failures:
        return
    for failure in failures:
        if isinstance(failure.error, TesseraError):
            raise failure.error
    raise CollectiveError(failures)


@dataclass(frozen=True)
class Ranks:
    """Run functions on the ranks of a process group, and exchange their results and errors."""

    rank: int
    world: int
    group: dist.ProcessGroup | None = None

    @staticmethod
    def current() -> Ranks:
        if dist.is_available() and dist.is_initialized():
            return Ranks(dist.get_rank(), dist.get_world_size())
        return Ranks(0, 1)

    def for_thread(self) -> Ranks:
        """Return the same ranks over a new process group: two threads must not use one group at the same time."""
        if self.world == 1:
            return self
        return Ranks(self.rank, self.world, dist.new_group(backend="gloo", timeout=_THREAD_TIMEOUT))

    def on_rank0(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0; return its result, or raise its error, on every rank."""
        box: list[Any] = [None]
        if self.rank == 0:
            box = [_attempt(work, 0)]
        if self.world > 1:
            dist.broadcast_object_list(box, src=0, group=self.group)
        (outcome,) = box
        if isinstance(outcome, Failure):
            raise_together([outcome])
        return cast(T, outcome)

    def on_all(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank; return all results, or raise the errors, on every rank."""
        outcomes: list[Any] = [_attempt(work, self.rank)]
        if self.world > 1:
            mine = outcomes[0]
            outcomes = [None] * self.world
            dist.all_gather_object(outcomes, mine, group=self.group)
        raise_together([outcome for outcome in outcomes if isinstance(outcome, Failure)])
        return cast(list[T], outcomes)

    def through_rank0(self, work: Callable[[], T], answer: Callable[[list[T]], list[U]]) -> U:
        """Run `work` on every rank, then `answer` on rank 0 with all results. Return this rank's entry of its list.

        If any rank fails, every rank raises the error.
        """
        outcomes: list[Any] = [_attempt(work, self.rank)]
        if self.world > 1:
            mine, outcomes = outcomes[0], [None] * self.world
            dist.gather_object(mine, outcomes if self.rank == 0 else None, dst=0, group=self.group)
        answers: list[Any] = [None] * self.world
        if self.rank == 0:
            failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
            result = failures if failures else _attempt(lambda: answer(outcomes), 0)
            failed = [result] if isinstance(result, Failure) else failures
            answers = [_Failures(failed)] * self.world if failed else cast(list[Any], result)
        box = [answers[0]]
        if self.world > 1:
            dist.scatter_object_list(box, answers, src=0, group=self.group)
        if isinstance(box[0], _Failures):
            raise_together(box[0].failures)
        return cast(U, box[0])


@dataclass(frozen=True)
class _Failures:
    failures: list[Failure]


def _attempt(work: Callable[[], T], rank: int) -> T | Failure:
    try:
        return work()
    except Exception as error:
        return Failure.of(error, rank)
