"""Samples of data sets as questions to a model, each with the answer that an evaluation expects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessera.core.sample import Message, Sample
from tessera.data.media.files import ArchiveMember, resolve
from tessera.data.media.urls import is_url
from tessera.data.sources.container import RecordError
from tessera.data.sources.source import Source


@dataclass(frozen=True)
class Question:
    """Hold a sample without its last answer, and this answer as the text that an evaluation expects."""

    sample: Sample
    expected: str
    root: Path

    def prompt(self) -> tuple[Sample, Path]:
        """Return the sample and the root folder of its media."""
        return self.sample, self.root

    @property
    def text(self) -> str:
        """Return the last question of the user."""
        turns = [message for message in self.sample.messages if message.role == "user"]
        return " ".join(_text(turns[-1]).split()) if turns else ""

    @property
    def group(self) -> str:
        """Return the number of images as text. Accuracy is reported per group."""
        count = len(self.sample.media())
        return "text only" if not count else "1 image" if count == 1 else f"{count} images"

    def marked(self, answer: str) -> dict[str, Any]:
        """Return the row of `answers.jsonl` for a model's answer, which is correct if it equals the expected text."""
        return {
            "id": self.sample.id,
            "group": self.group,
            "question": self.text,
            "expected": self.expected,
            "answer": answer,
            "correct": answer.strip() == self.expected.strip(),
            "images": [_where(part.value, self.root) for part in self.sample.media() if part.kind == "image"],
        }


def questions(sources: Sequence[Source]) -> Iterator[Question | RecordError]:
    """Yield every sample of data sets as a `Question`, or as the `RecordError` of an unusable record."""
    for source in sources:
        for _, sample in source.scan(range(len(source))):
            if isinstance(sample, RecordError):
                yield sample
                continue
            last = max((i for i, message in enumerate(sample.messages) if message.role == "assistant"), default=None)
            if not last:  # no assistant message, or only as the first message
                yield RecordError("no question with an answer", where=sample.id, code="data.no-question")
                continue
            yield Question(Sample(sample.id, sample.messages[:last]), _text(sample.messages[last]), source.root)


def _where(value: Any, root: Path) -> str:
    """Return the path or URL of an image, or a description for an image in a record or an archive."""
    if isinstance(value, ArchiveMember):
        return f"{value.name} in {value.file}"
    if is_url(value):
        return str(value)
    return str(resolve(value, root)) if isinstance(value, str) else f"{type(value).__name__} in the data"


def _text(message: Message) -> str:
    return "".join(str(part.value) for part in message.parts if part.kind == "text")
