"""Answer the rows of a file with the engine, and write the answers to a file."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from tessera.checkpoint.files import MANIFEST
from tessera.config.trust import Trust
from tessera.core.batch import Batch
from tessera.errors import TesseraError
from tessera.hub.config import local_model
from tessera.inference.batch.output import BatchOutput, PartFile
from tessera.inference.batch.rows import AnswerOptions, InputRows, Prompt, SampleRows, UnusableRow
from tessera.inference.engine.request import Delta, Request
from tessera.inference.load import AdapterPaths, adapter_strengths, load
from tessera.inference.prepare import PromptPool
from tessera.inference.weight_source import newest_checkpoint
from tessera.runtime import distributed as dist
from tessera.runtime.files import read_bytes
from tessera.runtime.progress import WorkProgress

_AHEAD = 64  # prompts that are prepared or being prepared, ahead of the engine
_IN_ENGINE = 512  # rows whose requests the engine has at once
_BLOCK = 64  # consecutive rows of a rank


class AnswersRequests(Protocol):
    """Declare what a batch needs of the engine."""

    @property
    def busy(self) -> bool: ...

    def add(self, request: Request) -> int: ...

    def step(self) -> list[Delta]: ...


@dataclass(frozen=True)
class Answering:
    """Hold what turns prompts into answers on one rank."""

    engine: AnswersRequests
    prompts: PromptPool
    stop_tokens: frozenset[int]


@dataclass(frozen=True)
class BatchResult:
    """Describe a finished output file."""

    path: Path
    rows: int
    errors: int  # rows that have an error instead of an answer
    answered: int  # rows that this rank answered now; the others were answered before, or by other ranks


def generate_answers(
    model: str | Path,
    data: str | Path,
    out: str | Path,
    *,
    root: str | Path | None = None,
    options: AnswerOptions | None = None,
    adapters: AdapterPaths | None = None,
    family: str | None = None,
    device: str = "auto",
    trust: Trust = False,
    overwrite: bool = False,
) -> BatchResult:
    """Answer every row of a data set, and write the answers to `out` as JSON lines, in the order of the rows.

    A last message of the assistant in a row is not asked; it is written as the expected answer. A row that cannot be
    used becomes a row with an error. If the process ends early, the same call continues. With a launcher such as
    torchrun the rows are split over ranks. `root`: folder of media; None: the folder of the data. `overwrite`: answer
    all rows again. Other arguments: see `load`.
    """
    rows = SampleRows.open(data, root, options or AnswerOptions())
    folder = local_model(model)
    strengths = adapter_strengths(adapters)

    @contextlib.contextmanager
    def start() -> Iterator[Answering]:
        from tessera.inference.engine.engine import Engine, EngineLimits

        loaded, processor = load(folder, device=device, adapters=strengths, family=family, trust=trust)
        with PromptPool(processor) as prompts:
            yield Answering(Engine(loaded, EngineLimits()), prompts, processor.stop_tokens)

    added = [[scale, model_facts(path)] for path, scale in strengths.items()]
    facts = {**model_facts(folder), "adapters": added}
    with _ranks(device) as world:
        return answer_file(rows, Path(out), {**facts, **rows.facts()}, start, overwrite=overwrite, world=world)


def model_facts(folder: Path) -> Mapping[str, Any]:
    """Return JSON that changes whenever the weights of a model may have changed."""
    weights = folder if folder.is_file() else newest_checkpoint(folder) or folder
    if (weights / MANIFEST).is_file():
        content: Any = hashlib.sha256(read_bytes(weights / MANIFEST)).hexdigest()
    else:
        files = [weights] if weights.is_file() else sorted([*weights.glob("*.safetensors"), *weights.glob("*.json")])
        content = {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files}
    return {"model": str(weights.resolve()), "weights": content}


@contextlib.contextmanager
def _ranks(device: str) -> Iterator[dist.World]:
    """Join the process group of a launcher. A single process needs none."""
    if dist.expected_world_size() == 1:
        yield dist.World(0, 1, 0, torch.device("cpu"))
    else:
        with dist.world(device) as world:
            yield world


def answer_file(
    rows: InputRows,
    out: Path,
    facts: Mapping[str, Any],
    start: Callable[[], contextlib.AbstractContextManager[Answering]],
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
                output = stack.enter_context(BatchOutput.claimed(out, len(rows), facts, overwrite))
            else:
                output = BatchOutput.joined(out)
        answered = output.answered() | output.finished
        dist.wait_for_all_ranks(world)  # a rank that is already writing would change what the others have just read
        numbers = [*_missing(answered, world)]
        if numbers:
            with output.part(world.rank) as part, start() as answering:
                _RowAnswers(answering, rows, part).run(numbers, answered)
        dist.wait_for_all_ranks(world)
        with dist.main_rank_first(world):
            if world.is_main and not output.finished:
                output.publish()
        answered_now = sum(int((~answered[block.start : block.stop]).sum()) for block in numbers)
        return BatchResult(out, len(rows), output.errors, answered_now)


def _missing(answered: np.ndarray, world: dist.World) -> Iterator[range]:
    """Yield the ranges of rows that this rank reads: those of its blocks that have a row without an answer."""
    size = max(1, min(_BLOCK, len(answered) // (8 * world.size)))
    for first in range(world.rank * size, len(answered), world.size * size):
        missing = np.flatnonzero(~answered[first : first + size])
        if len(missing):
            yield range(first + int(missing[0]), first + int(missing[-1]) + 1)


@dataclass
class _OpenRow:
    """Hold a row whose requests are in the engine."""

    prompt: Prompt
    answers: list[list[Delta]] = field(default_factory=list)
    unfinished: int = 0
    error: TesseraError | None = None


@dataclass
class _RowAnswers:
    """Answer rows with one engine. While it steps, the prompts of the next rows are prepared."""

    answering: Answering
    rows: InputRows
    part: PartFile
    _preparing: dict[Future[Batch], Prompt] = field(default_factory=dict)
    _open: dict[int, tuple[_OpenRow, int]] = field(default_factory=dict)  # by the number of a request; index of answer
    _tokens: int = 0

    def run(self, numbers: list[range], answered: np.ndarray) -> None:
        """Answer the rows in `numbers` that are not answered."""
        engine, began = self.answering.engine, time.monotonic()
        source = (row for block in numbers for row in self.rows.read(block) if not answered[row.index])
        total = sum(int((~answered[block.start : block.stop]).sum()) for block in numbers)
        more = True
        with WorkProgress("answering", total, "rows") as self._progress:
            while more or self._preparing or engine.busy:
                while more and len(self._preparing) < _AHEAD:
                    row = next(source, None)
                    more = row is not None
                    if isinstance(row, UnusableRow):
                        self._refuse(row, row.error)
                    elif row is not None:
                        self._preparing[self.answering.prompts.submit(row.conversation, row.root)] = row
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

    def _add(self, prompt: Prompt, batch: Batch) -> None:
        row = _OpenRow(prompt)
        try:
            for number, request in enumerate(self.rows.requests(prompt, batch, self.answering.stop_tokens)):
                self._open[self.answering.engine.add(request)] = row, number
                row.answers.append([])
        except TesseraError as error:
            row.error = error
        row.unfinished = len(row.answers)
        if row.error is not None and not row.unfinished:
            self._refuse(prompt, row.error)

    def _hear(self, delta: Delta) -> None:
        row, number = self._open[delta.request]
        row.answers[number].append(delta)
        self._tokens += len(delta.tokens)
        if delta.finish is None:
            return
        del self._open[delta.request]
        row.unfinished -= 1
        if delta.finish.reason == "error":
            row.error = delta.finish.error or TesseraError("the answer failed", code="generation.answer-failed")
        if row.unfinished:
            return
        if row.error is not None:
            self._refuse(row.prompt, row.error)
        else:
            self.part.write(row.prompt.index, self.rows.answer(row.prompt, row.answers))
            self._progress.count()

    def _refuse(self, row: Prompt | UnusableRow, error: BaseException) -> None:
        self.part.write(row.index, self.rows.refusal(row, error), error=True)
        self._progress.count()
