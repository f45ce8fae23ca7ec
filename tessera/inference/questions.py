"""Samples of data sets as questions to a model, each with the answer that an evaluation expects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tessera.core.sample import MediaSize, Message, Region, Sample
from tessera.data.media.clips import AudioClip
from tessera.data.media.files import ArchiveMember, Limits, resolve
from tessera.data.media.read import probe
from tessera.data.media.urls import is_url
from tessera.data.media.video_frames import VideoSampling
from tessera.data.sources.container import RecordError
from tessera.data.sources.regions import check_regions
from tessera.data.sources.source import Source
from tessera.errors import TesseraError
from tessera.models.processing.grounding import read_numbers
from tessera.models.vision.processor import VisionProcessor


@dataclass(frozen=True)
class Question:
    """Hold a sample without its last answer, and this answer as the text that an evaluation expects."""

    sample: Sample
    expected: str
    root: Path
    regions: tuple[Region, ...] = ()  # boxes and points of the expected answer, in pixels of their images
    size: MediaSize | None = None  # size of the image that contains the first of `regions`

    def prompt(self) -> tuple[Sample, Path]:
        """Return the sample and the root folder of its media."""
        return self.sample, self.root

    @property
    def text(self) -> str:
        """Return the last question of the user."""
        turns = [message for message in self.sample.messages if message.role == "user"]
        return " ".join(_text(turns[-1]).split()) if turns else ""

    def boxes(self, answer: str, processor: object) -> list[Region]:
        """Return the boxes and points that an answer names, in pixels, if the expected answer has any."""
        if self.size is None or not isinstance(processor, VisionProcessor):
            return []
        points = any(len(region.numbers) == 2 for region in self.regions)
        read = processor.read_boxes(answer, self.size, points)
        return [replace(region, image=self.regions[0].image) for region in read]

    @property
    def group(self) -> str:
        """Return the group of the question in reports: its media, such as "2 images", or "text only"."""
        sounds = sum(part.kind == "audio" for part in self.sample.media())
        counts = {"image": len(self.sample.media()) - sounds, "recording": sounds}
        listed = [f"{count} {name}{'s' if count > 1 else ''}" for name, count in counts.items() if count]
        return " and ".join(listed) or "text only"

    def marked(self, answer: str, processor: object = None) -> dict[str, Any]:
        """Return the row of `answers.jsonl` for a model's answer, which is correct if it equals the expected text.

        With boxes or points, the row has `regions`: those that are expected and answered, in pixels of the image.
        """
        both = {"expected": self.regions, "answer": self.boxes(answer, processor)}
        regions = [
            {"of": name, "image": region.image, "numbers": list(region.numbers), "label": region.label}
            for name, regions_of_text in both.items()
            for region in regions_of_text
        ]
        return {
            "id": self.sample.id,
            "group": self.group,
            "question": self.text,
            "expected": self.expected,
            "answer": answer,
            "correct": answer.strip() == self.expected.strip(),
            "images": [  # images first, then recordings
                _where(part.value, self.root)
                for kind in ("image", "audio")
                for part in self.sample.media()
                if part.kind == kind
            ],
            **({"regions": regions} if regions else {}),
        }


def questions(sources: Sequence[Source], processor: object = None) -> Iterator[Question | RecordError]:
    """Yield every sample of data sets as a `Question`, or as the `RecordError` of an unusable record.

    `processor`: writes the boxes and points of expected answers as its model does.
    """
    for source in sources:
        for _, sample in source.scan(range(len(source))):
            yield question_of(sample, source.root, processor)


def question_of(sample: Sample | RecordError, root: Path, processor: object = None) -> Question | RecordError:
    """Return a sample as a `Question`, or the reason why it has none. `root`: folder of its media."""
    if isinstance(sample, RecordError):
        return sample
    last = max((i for i, message in enumerate(sample.messages) if message.role == "assistant"), default=None)
    if not last:  # no message of the assistant, or only the first message, so that no question precedes it
        return RecordError("no question with an answer", where=sample.id, code="data.no-question")
    question = Question(Sample(sample.id, sample.messages[:last]), _text(sample.messages[last]), root)
    try:
        return _with_regions(question, sample.messages[last], processor)
    except TesseraError as error:
        return RecordError(error.what, where=sample.id, code=error.code)


def _with_regions(question: Question, answer: Message, processor: object) -> Question:
    """Return a question with the boxes and points of its answer.

    These are `regions` of the sample, or, for one image, are read from the answer's text in the family's format.
    """
    if not isinstance(processor, VisionProcessor):
        return question
    regions = [region for part in answer.parts for region in part.regions]
    images = [part for part in question.sample.media() if part.kind == "image"]
    if not regions and (len(images) != 1 or not any(True for _ in read_numbers(question.expected, points=False))):
        return question
    try:
        sizes = [probe(part, question.root, Limits(), VideoSampling()) for part in images]
    except (TesseraError, OSError):  # the code that reads the image for the prompt reports this error
        return question
    if not regions:
        read = processor.read_boxes(question.expected, sizes[0], points=False)
        return replace(question, regions=tuple(read), size=sizes[0])
    check_regions(Sample("", (Message("user", tuple(images)), answer)), sizes)
    boxes = tuple(
        Region(region.pixels(sizes[region.image]), region.label, region.image) for region in regions if region.numbers
    )
    expected = processor.answer_text(answer, sizes)
    return replace(question, expected=expected, regions=boxes, size=sizes[boxes[0].image] if boxes else None)


def _where(value: Any, root: Path) -> str:
    """Return the path or URL of a media file, or a description for one in a record or an archive."""
    if isinstance(value, AudioClip):
        return _where(value.value, root) + value.span
    if isinstance(value, ArchiveMember):
        return f"{value.name} in {value.file}"
    if is_url(value):
        return str(value)
    return str(resolve(value, root)) if isinstance(value, str) else f"{type(value).__name__} in the data"


def _text(message: Message) -> str:
    return "".join(part.spelled() for part in message.parts if part.kind == "text")
