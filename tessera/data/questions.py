"""Samples as questions: cut before their last answer, which is what is expected."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessera.core.types import Message, Sample
from tessera.data.media.read import resolve
from tessera.data.sources.base import Source
from tessera.data.sources.forms import RowError
from tessera.data.sources.within import Within


@dataclass(frozen=True)
class Question:
    """A sample cut before its last answer."""

    sample: Sample
    expected: str
    root: Path

    @property
    def text(self) -> str:
        asked = [m for m in self.sample.messages if m.role == "user"]
        return " ".join(_text(asked[-1]).split()) if asked else ""

    @property
    def group(self) -> str:
        """What kind of question it is, by what it shows: results are given for each."""
        count = len(self.sample.media())
        return "text only" if not count else "1 picture" if count == 1 else f"{count} pictures"

    def marked(self, answer: str) -> dict[str, Any]:
        """The answer as records keep it. It counts when it equals the expected text."""
        return {
            "id": self.sample.id,
            "group": self.group,
            "question": self.text,
            "expected": self.expected,
            "answer": answer,
            "correct": answer.strip() == self.expected.strip(),
            "images": [_where(p.value, self.root) for p in self.sample.media() if p.kind == "image"],
        }


def questions(sources: Sequence[Source]) -> Iterator[Question | RowError]:
    for source in sources:
        for _, sample in source.scan(range(len(source))):
            if isinstance(sample, RowError):
                yield sample
                continue
            last = max((i for i, m in enumerate(sample.messages) if m.role == "assistant"), default=None)
            if not last:  # no answer, or nothing before it
                yield RowError(sample.id, "has no question with an answer")
                continue
            yield Question(Sample(sample.id, sample.messages[:last]), _text(sample.messages[last]), source.root)


def _where(value: Any, root: Path) -> str:
    """Where a picture can be looked at; those that are no files of their own are only described."""
    if isinstance(value, Within):
        return f"{value.name} in {value.file}"
    return str(resolve(value, root)) if isinstance(value, str) else f"{type(value).__name__} in the data"


def _text(message: Message) -> str:
    return "".join(str(p.value) for p in message.parts if p.kind == "text")
