"""Read the rows of an input file as prompts, and write what became of each as a row of the output file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tessera.config.run_config import SourceSection
from tessera.core.batch import Batch
from tessera.core.sample import Message, Part, Sample
from tessera.data.sources.container import RecordError
from tessera.data.sources.source import Source, open_source
from tessera.engine.request import Answer, Request, Sampling
from tessera.errors import TesseraError
from tessera.inference.prepare import Conversation
from tessera.runtime.rng import derive

Row = dict[str, Any]


@dataclass(frozen=True)
class PromptRow:
    """Hold one row of the input: the conversation to answer, and further fields of its output row."""

    index: int
    conversation: Conversation
    root: Path | None
    identity: Row  # the first fields of the output row


@dataclass(frozen=True)
class UnusableRow:
    """Hold the reason why a row of the input cannot be answered."""

    index: int
    identity: Row
    error: Exception


@dataclass(frozen=True)
class AnswerOptions:
    """State how all rows of a data set are answered.

    The seed of a row is derived from `sampling.seed` and the index of the row.
    """

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
        unused = [name for name, off in _OF_SAMPLING.items() if getattr(self.sampling, name) != off]
        if self.sampling.temperature == 0 and unused:
            raise TesseraError(
                f"{' and '.join(unused)} has no effect at temperature 0, which takes the likeliest token",
                where="sampling",
                fix=f"set a temperature above 0, or leave {' and '.join(unused)} out",
                code="generation.option-without-effect",
            )

    def facts(self) -> Row:
        """Return the options as a JSON mapping. It is compared when an earlier batch is continued."""
        fields = {name: getattr(self.sampling, name) for name in _SAMPLING}
        return {"max_new_tokens": self.max_new_tokens, **fields, "system": self.system}


# Option without effect at temperature 0 -> value that turns it off.
_OF_SAMPLING: dict[str, float] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


@dataclass(frozen=True)
class SampleRows:
    """Read the samples of a data set.

    If the last message is the assistant's, it is the expected answer, and not part of the question.
    """

    source: Source
    options: AnswerOptions

    @staticmethod
    def open(data: str | Path, root: str | Path | None, options: AnswerOptions) -> SampleRows:
        section = SourceSection.model_validate({"path": data, "root": root})
        return SampleRows(open_source(section, answered=False), options)

    def __len__(self) -> int:
        return len(self.source)

    def facts(self) -> Row:
        """Return JSON that changes whenever the rows or the options may have changed."""
        return {"data": self.source.facts(), **self.options.facts()}

    def read(self, numbers: range) -> Iterator[PromptRow | UnusableRow]:
        """Yield consecutive rows."""
        for index, sample in self.source.scan(numbers):
            if isinstance(sample, RecordError):
                yield UnusableRow(index, {"index": index, "id": str(sample.where or "")}, sample)
                continue
            identity: Row = {"index": index, "id": sample.id}
            messages = sample.messages
            if messages and messages[-1].role == "assistant":
                identity["expected"] = "".join(part.spelled() for part in messages[-1].parts if part.kind == "text")
                messages = messages[:-1]
            if not any(message.role in ("user", "tool") for message in messages):
                error = RecordError("the row has no question", where=sample.id, code="data.no-question")
                yield UnusableRow(index, identity, error)
                continue
            if self.options.system is not None and messages[0].role != "system":
                messages = (Message("system", (Part("text", self.options.system),)), *messages)
            yield PromptRow(index, Sample(sample.id, messages), self.source.root, identity)

    def request(self, prompt: PromptRow, batch: Batch, stop_tokens: frozenset[int]) -> Request:
        """Return the request of a row to the engine."""
        options = self.options
        sampling = replace(options.sampling, seed=derive(options.sampling.seed, "row", prompt.index))
        return Request(batch, sampling, options.max_new_tokens, stop_tokens=stop_tokens, stream=False)

    def answer(self, prompt: PromptRow, answer: Answer) -> Row:
        """Return the output row of an answered row."""
        return {
            **prompt.identity,
            "answer": answer.text,
            "finish": answer.finish.reason,
            "prompt_tokens": answer.finish.prompt_tokens,
            "new_tokens": answer.finish.new_tokens,
        }

    def refusal(self, row: PromptRow | UnusableRow, error: BaseException) -> Row:
        """Return the output row of a row that cannot be answered."""
        return {**row.identity, "answer": None, "error": error_row(error)}


def error_row(error: BaseException) -> Row:
    """Return the code and the text of an error."""
    if isinstance(error, TesseraError):
        return {"code": error.code, "message": error.what}
    return {"code": None, "message": f"{type(error).__name__}: {error}".splitlines()[0]}
