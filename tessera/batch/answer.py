"""Answer the rows that have no answer yet: prompts are prepared ahead while the engine steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tessera.batch.output import BatchOutput, PartFile
from tessera.batch.rows import PromptRow, SampleRows, UnusableRow
from tessera.core.batch import Batch
from tessera.engine.engine import Engine
from tessera.engine.request import Request
from tessera.inference.answering import answers_to_all
from tessera.inference.prepare import PromptPool
from tessera.runtime import distributed as dist
from tessera.runtime.progress import TokenProgress

_AT_ONCE = 512  # maximum number of rows that the engine has at once: those that it answers, and queued ones
_BLOCK = 64  # maximum number of consecutive rows that one rank answers; fewer for a small file


class AnswersRows(Protocol):
    """Declare the interface of objects that answer input rows on one rank."""

    def run(self, numbers: list[range], answered: np.ndarray, part: PartFile) -> None:
        """Answer the rows in `numbers` that are not answered, and write them."""
        ...


@dataclass(frozen=True)
class BatchResult:
    """Describe a finished output file."""

    path: Path
    rows: int
    errors: int  # rows that have an error instead of an answer
    answered: int  # rows that this rank answered in this call; the others were answered earlier, or by other ranks


def answer_file(
    rows: int,
    out: Path,
    facts: Mapping[str, Any],
    start: Callable[[], contextlib.AbstractContextManager[AnswersRows]],
    *,
    overwrite: bool = False,
    world: dist.World,
) -> BatchResult:
    """Answer the rows that have no answer yet, on all ranks, and publish the output file.

    `facts`: JSON of model, input and options. An existing output with other facts is an error, unless `overwrite`.
    `start`: load the model; it is not called if all rows are answered.
    """
    with contextlib.ExitStack() as stack:
        with dist.main_rank_first(world):
            if world.is_main:
                output = stack.enter_context(BatchOutput.claimed(out, rows, facts, overwrite))
            else:
                output = BatchOutput.joined(out)
        answered = output.answered() | output.finished
        # wait here: a rank that starts to write would change files that other ranks are still reading
        dist.wait_for_all_ranks(world)
        numbers = [*_missing(answered, world)]
        if not answered.all():  # every rank loads the model, even if its rows are answered: loading is collective
            with _started(start, output, world) as answering, output.part(world.rank) as part:
                answering.run(numbers, answered, part)
        dist.wait_for_all_ranks(world)
        with dist.main_rank_first(world):
            if world.is_main and not output.finished:
                output.publish()
        return BatchResult(out, rows, output.errors, count_missing(numbers, answered))


@contextlib.contextmanager
def _started(
    start: Callable[[], contextlib.AbstractContextManager[AnswersRows]], output: BatchOutput, world: dist.World
) -> Iterator[AnswersRows]:
    """Load the model. If that fails on the main rank before a rank has a part file, remove the unfinished output."""
    with contextlib.ExitStack() as stack:
        try:
            answering = stack.enter_context(start())
        except BaseException:
            if world.is_main:
                output.withdraw()
            raise
        yield answering


def count_missing(numbers: list[range], answered: np.ndarray) -> int:
    """Return how many of the rows in `numbers` are not answered."""
    return sum(int((~answered[block.start : block.stop]).sum()) for block in numbers)


def _missing(answered: np.ndarray, world: dist.World) -> Iterator[range]:
    """Yield the rows that this rank reads: in each of its blocks, from the first to the last row without an answer."""
    size = max(1, min(_BLOCK, len(answered) // (8 * world.size)))
    for first in range(world.rank * size, len(answered), world.size * size):
        missing = np.flatnonzero(~answered[first : first + size])
        if len(missing):
            yield range(first + int(missing[0]), first + int(missing[-1]) + 1)


@dataclass
class SampleAnswers:
    """Answer the samples of a data set with one engine."""

    rows: SampleRows
    engine: Engine
    prompts: PromptPool
    stop_tokens: frozenset[int]

    def run(self, numbers: list[range], answered: np.ndarray, part: PartFile) -> None:
        """Answer the rows in `numbers` that are not answered."""

        def refuse(row: PromptRow | UnusableRow, error: BaseException) -> None:
            part.write(row.index, self.rows.refusal(row, error), error=True)
            progress.count()

        def usable() -> Iterator[PromptRow]:
            for row in (row for block in numbers for row in self.rows.read(block) if not answered[row.index]):
                if isinstance(row, UnusableRow):
                    refuse(row, row.error)
                else:
                    yield row

        def prepare(row: PromptRow) -> Future[Batch]:
            return self.prompts.submit(row.conversation, row.root)

        def request(row: PromptRow, batch: Batch) -> Request:
            return self.rows.request(row, batch, self.stop_tokens)

        with TokenProgress("answering", count_missing(numbers, answered), "rows") as progress:
            on_step = progress.count_tokens
            for row, answer in answers_to_all(self.engine, usable(), prepare, request, _AT_ONCE, on_step):
                if isinstance(answer, BaseException):
                    refuse(row, answer)
                else:
                    part.write(row.index, self.rows.answer(row, answer))
                    progress.count()
