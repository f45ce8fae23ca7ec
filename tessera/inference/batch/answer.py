"""Answer the rows that have no answer yet: prompts are prepared ahead while the engine steps."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tessera.core.batch import Batch
from tessera.errors import TesseraError
from tessera.inference.batch.output import BatchOutput, PartFile
from tessera.inference.batch.rows import PromptRow, SampleRows, UnusableRow
from tessera.inference.engine.request import Answer, Delta, Request
from tessera.inference.prepare import PromptPool
from tessera.runtime import distributed as dist
from tessera.runtime.progress import WorkProgress

_AHEAD = 64  # prompts that are prepared or being prepared, ahead of the engine
_IN_ENGINE = 512  # rows that the engine has at once: those it answers, and the next ones
_BLOCK = 64  # consecutive rows of a rank


class AnswersRows(Protocol):
    """Declare what answers the rows of an input on one rank."""

    def run(self, numbers: list[range], answered: np.ndarray, part: PartFile) -> None:
        """Answer the rows in `numbers` that are not answered, and write them."""
        ...


class AnswersRequests(Protocol):
    """Declare what a batch needs of the engine."""

    @property
    def busy(self) -> bool: ...

    def add(self, request: Request) -> int: ...

    def step(self) -> list[Delta]: ...


@dataclass(frozen=True)
class BatchResult:
    """Describe a finished output file."""

    path: Path
    rows: int
    errors: int  # rows that have an error instead of an answer
    answered: int  # rows that this rank answered now; the others were answered before, or by other ranks


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

    `facts`: JSON of model, input and options, which must not change until the output is finished. `start`: load the
    model; it is not called if all rows are answered.
    """
    with contextlib.ExitStack() as stack:
        with dist.main_rank_first(world):
            if world.is_main:
                output = stack.enter_context(BatchOutput.claimed(out, rows, facts, overwrite))
            else:
                output = BatchOutput.joined(out)
        answered = output.answered() | output.finished
        dist.wait_for_all_ranks(world)  # a rank that is already writing would change what the others have just read
        numbers = [*_missing(answered, world)]
        if numbers:
            with output.part(world.rank) as part, start() as answering:
                answering.run(numbers, answered, part)
        dist.wait_for_all_ranks(world)
        with dist.main_rank_first(world):
            if world.is_main and not output.finished:
                output.publish()
        return BatchResult(out, rows, output.errors, count_missing(numbers, answered))


def count_missing(numbers: list[range], answered: np.ndarray) -> int:
    """Return how many of the rows in `numbers` are not answered."""
    return sum(int((~answered[block.start : block.stop]).sum()) for block in numbers)


def _missing(answered: np.ndarray, world: dist.World) -> Iterator[range]:
    """Yield the rows that this rank reads: of each of its blocks, from the first row without an answer to the last."""
    size = max(1, min(_BLOCK, len(answered) // (8 * world.size)))
    for first in range(world.rank * size, len(answered), world.size * size):
        missing = np.flatnonzero(~answered[first : first + size])
        if len(missing):
            yield range(first + int(missing[0]), first + int(missing[-1]) + 1)


@dataclass
class SampleAnswers:
    """Answer the samples of a data set with one engine."""

    rows: SampleRows
    engine: AnswersRequests
    prompts: PromptPool
    stop_tokens: frozenset[int]
    _preparing: dict[Future[Batch], PromptRow] = field(default_factory=dict)
    _open: dict[int, PromptRow] = field(default_factory=dict)  # by the number of the request
    _deltas: dict[int, list[Delta]] = field(default_factory=dict)
    _tokens: int = 0

    def run(self, numbers: list[range], answered: np.ndarray, part: PartFile) -> None:
        """Answer the rows in `numbers` that are not answered."""
        engine, began, self._part = self.engine, time.monotonic(), part
        source = (row for block in numbers for row in self.rows.read(block) if not answered[row.index])
        more = True
        with WorkProgress("answering", count_missing(numbers, answered), "rows") as self._progress:
            while more or self._preparing or engine.busy:
                while more and len(self._preparing) < _AHEAD:
                    row = next(source, None)
                    more = row is not None
                    if isinstance(row, UnusableRow):
                        self._refuse(row, row.error)
                    elif row is not None:
                        self._preparing[self.prompts.submit(row.conversation, row.root)] = row
                self._ask()
                if engine.busy:
                    for delta in engine.step():
                        self._hear(delta)
                    self._progress.note = f"{self._tokens / max(time.monotonic() - began, 1e-9):,.0f} tokens/s"
                    self._progress.count(0)
                elif self._preparing:
                    wait(self._preparing, return_when=FIRST_COMPLETED)
        assert not self._open, "the engine has lost a request"

    def _ask(self) -> None:
        """Pass prepared prompts to the engine, as far as it has room."""
        for future in [future for future in self._preparing if future.done()]:
            if len(self._open) >= _IN_ENGINE:
                return
            prompt = self._preparing.pop(future)
            error = future.exception()
            if isinstance(error, TesseraError) and error.code == "environment.workers-killed":
                raise error  # no row is the cause
            if error is not None:
                self._refuse(prompt, error)
            else:
                self._add(prompt, future.result())

    def _add(self, prompt: PromptRow, batch: Batch) -> None:
        try:
            number = self.engine.add(self.rows.request(prompt, batch, self.stop_tokens))
        except TesseraError as error:
            self._refuse(prompt, error)
        else:
            self._open[number], self._deltas[number] = prompt, []

    def _hear(self, delta: Delta) -> None:
        self._deltas[delta.request].append(delta)
        self._tokens += len(delta.tokens)
        if delta.finish is None:
            return
        prompt, deltas = self._open.pop(delta.request), self._deltas.pop(delta.request)
        if delta.finish.error is not None:
            self._refuse(prompt, delta.finish.error)
        else:
            self._part.write(prompt.index, self.rows.answer(prompt, Answer.of(deltas)))
            self._progress.count()

    def _refuse(self, row: PromptRow | UnusableRow, error: BaseException) -> None:
        self._part.write(row.index, self.rows.refusal(row, error), error=True)
        self._progress.count()
