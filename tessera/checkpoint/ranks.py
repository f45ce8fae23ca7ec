"""Acting together: work done by one rank or all, whose result or failure reaches every rank.

A failure on one rank must never leave the others waiting in a collective. So work that can fail runs inside `once` or
`each`, which gather outcomes first and then raise the same error everywhere.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch.distributed as dist

from tessera.core.errors import TesseraError

T = TypeVar("T")


@dataclass(frozen=True)
class Failure:
    """An error on its way between ranks. `error` is kept when it travels well, otherwise its traceback is text."""

    rank: int
    error: TesseraError | OSError | None
    text: str

    @staticmethod
    def of(error: BaseException, rank: int) -> Failure:
        kept = error if isinstance(error, (TesseraError, OSError)) else None
        return Failure(rank, kept, "".join(traceback.format_exception(error)))


class RankFailure(RuntimeError):
    """Some ranks failed for a reason that is not the user's; raised on every rank."""

    def __init__(self, failures: list[Failure]) -> None:
        self.failures = failures
        super().__init__("\n".join(f"[rank {f.rank}] {f.text}" for f in failures))


def raise_together(failures: list[Failure]) -> None:
    """The user's own mistake is shown as it is; anything else with the rank it came from."""
    if not failures:
        return
    for failure in failures:
        if isinstance(failure.error, TesseraError):
            raise failure.error
    raise RankFailure(failures)


@dataclass(frozen=True)
class Ranks:
    rank: int
    world: int

    @staticmethod
    def current() -> Ranks:
        if dist.is_available() and dist.is_initialized():
            return Ranks(dist.get_rank(), dist.get_world_size())
        return Ranks(0, 1)

    @property
    def alone(self) -> bool:
        return not (dist.is_available() and dist.is_initialized())

    def once(self, work: Callable[[], T]) -> T:
        """Rank 0 works; every rank gets its result, or its error."""
        box: list[Any] = [None]
        if self.rank == 0:
            box = [_attempt(work, 0)]
        if self.world > 1:
            dist.broadcast_object_list(box, src=0)
        (outcome,) = box
        if isinstance(outcome, Failure):
            raise_together([outcome])
        return cast(T, outcome)

    def each(self, work: Callable[[], T]) -> list[T]:
        """Every rank works; every rank gets all results, or all errors."""
        outcomes: list[Any] = [_attempt(work, self.rank)]
        if self.world > 1:
            mine = outcomes[0]
            outcomes = [None] * self.world
            dist.all_gather_object(outcomes, mine)
        raise_together([outcome for outcome in outcomes if isinstance(outcome, Failure)])
        return cast(list[T], outcomes)


def _attempt(work: Callable[[], T], rank: int) -> T | Failure:
    try:
        return work()
    except Exception as error:
        return Failure.of(error, rank)
