"""Read the rows of an input file as prompts, and write what became of each as a row of the output file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tessera.config.run_config import SourceSection
from tessera.core.batch import Batch
from tessera.core.sample import Message, Part, Sample
from tessera.data.sources.container import RecordError
from tessera.data.sources.source import Source, open_source
from tessera.errors import TesseraError
from tessera.inference.engine.request import Delta, Request, Sampling
from tessera.inference.prepare import Conversation
from tessera.runtime.rng import derive

Row = dict[str, Any]


@dataclass(frozen=True)
class Prompt:
    """Hold one row of the input: the conversation to answer, and what its output row needs beside the answer."""

    index: int
    conversation: Conversation
    root: Path | None
    identity: Row  # the first fields of the output row
    settings: Any = None  # what the row itself says about its answer, in a form of its own


@dataclass(frozen=True)
class UnusableRow:
    """Hold the reason why a row of the input cannot be answered."""

    index: int
    identity: Row
    error: Exception


@dataclass(frozen=True)
class AnswerOptions:
    """State how all rows of a data set are answered. The seed of a row is derived from `sampling.seed` and its index."""

    max_new_tokens: int = 256
    sampling: Sampling = field(default_factory=Sampling)
    system: str | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise TesseraError(
                f"max_new_tokens must be 1 or more, got {self.max_new_tokens}",
                allowed=["1 and above"],
                code="generation.max-tokens-too-small",
            )

    def request(self, prompt: Batch, index: int, stop_tokens: frozenset[int]) -> Request:
        sampling = replace(self.sampling, seed=derive(self.sampling.seed, "row", index))
        return Request(prompt, sampling, self.max_new_tokens, stop_tokens=stop_tokens)

    def facts(self) -> Row:
        """Return the options as JSON."""
        fields = {name: getattr(self.sampling, name) for name in _SAMPLING}
        return {"max_new_tokens": self.max_new_tokens, **fields, "system": self.system}


_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


class InputRows(ABC):
    """Read the rows of one input file, and form the rows of its output file."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def facts(self) -> Any:
        """Return JSON that changes whenever the rows may have changed."""

    @abstractmethod
    def read(self, numbers: range) -> Iterator[Prompt | UnusableRow]:
        """Yield consecutive rows."""

    @abstractmethod
    def requests(self, prompt: Prompt, batch: Batch, stop_tokens: frozenset[int]) -> list[Request]:
        """Return what the engine is asked for a row. Its answers become one row of the output."""

    @abstractmethod
    def answer(self, prompt: Prompt, answers: Sequence[Sequence[Delta]]) -> Row:
        """Return the output row for the answers to the requests of a row. None of them has the finish `error`."""

    @abstractmethod
    def refusal(self, row: Prompt | UnusableRow, error: BaseException) -> Row:
        """Return the output row for a row that cannot be answered."""


@dataclass(frozen=True)
class SampleRows(InputRows):
    """Read the samples of a data set. A last message of the assistant is not asked: it is the expected answer."""

    source: Source
    options: AnswerOptions

    @staticmethod
    def open(data: str | Path, root: str | Path | None, options: AnswerOptions) -> SampleRows:
        section = SourceSection.model_validate({"path": data, "root": root})
        return SampleRows(open_source(section, answered=False), options)

    def __len__(self) -> int:
        return len(self.source)

    def facts(self) -> Any:
        return {"data": self.source.facts(), **self.options.facts()}

    def read(self, numbers: range) -> Iterator[Prompt | UnusableRow]:
        for index, sample in self.source.scan(numbers):
            if isinstance(sample, RecordError):
                yield UnusableRow(index, {"index": index, "id": str(sample.where or "")}, sample)
                continue
            identity: Row = {"index": index, "id": sample.id}
            messages = sample.messages
            if messages and messages[-1].role == "assistant":
                identity["expected"] = "".join(str(part.value) for part in messages[-1].parts if part.kind == "text")
                messages = messages[:-1]
            if not any(message.role in ("user", "tool") for message in messages):
                error = RecordError("the row has no question", where=sample.id, code="data.no-question")
                yield UnusableRow(index, identity, error)
                continue
            if self.options.system is not None and messages[0].role != "system":
                messages = (Message("system", (Part("text", self.options.system),)), *messages)
            yield Prompt(index, Sample(sample.id, messages), self.source.root, identity)

    def requests(self, prompt: Prompt, batch: Batch, stop_tokens: frozenset[int]) -> list[Request]:
        return [self.options.request(batch, prompt.index, stop_tokens)]

    def answer(self, prompt: Prompt, answers: Sequence[Sequence[Delta]]) -> Row:
        deltas = answers[0]
        finish = deltas[-1].finish
        assert finish is not None
        return {
            **prompt.identity,
            "answer": "".join(delta.text for delta in deltas),
            "finish": finish.reason,
            "prompt_tokens": finish.prompt_tokens,
            "new_tokens": finish.new_tokens,
        }

    def refusal(self, row: Prompt | UnusableRow, error: BaseException) -> Row:
        return {**row.identity, "answer": None, "error": error_row(error)}


def error_row(error: BaseException) -> Row:
    """Return the code and the text of an error."""
    if isinstance(error, TesseraError):
        return {"code": error.code, "message": error.what}
    return {"code": None, "message": f"{type(error).__name__}: {error}".splitlines()[0]}
