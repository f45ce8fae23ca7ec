"""Ask the questions of a benchmark, mark the answers, and write one row of JSON for each."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tessera.batch.answer import count_missing
from tessera.batch.output import PartFile
from tessera.batch.rows import error_row
from tessera.core.sample import Sample
from tessera.data.media.clips import AudioClip
from tessera.data.media.files import ArchiveMember, opened, size_of
from tessera.data.sources.container import RecordError
from tessera.engine.request import Answer, Sampling
from tessera.errors import TesseraError
from tessera.evaluation.benchmark import LARGEST, Benchmark, BenchmarkQuestion
from tessera.evaluation.protocol import sampled_blocks
from tessera.inference.answering import context_of, numbered_answers
from tessera.inference.loaded import LoadedModel, LoadedProcessor
from tessera.models.vision.processor import VisionProcessor
from tessera.runtime.files import read_jsonl
from tessera.runtime.progress import TokenProgress

Row = dict[str, Any]

AT_ONCE = 64
_MOST_PROMPT = 20_000  # limit of the characters of a prompt in `answers.jsonl`
# A request that ends with an error code of this prefix, such as for a prompt that is too long, gets an empty answer.
_OF_THE_MODEL = "generation."


@dataclass(frozen=True)
class BenchmarkAnswers:
    """Answer the questions of a benchmark that have no answer yet, on one rank."""

    benchmark: Benchmark
    model: LoadedModel
    processor: LoadedProcessor
    max_new_tokens: int
    sampling: Sampling
    at_once: int = AT_ONCE

    def run(self, numbers: list[range], answered: np.ndarray, part: PartFile) -> None:
        """Answer the questions in `numbers` that are not answered."""

        def usable() -> Iterator[tuple[int, BenchmarkQuestion]]:
            for number, question in (row for block in numbers for row in self.benchmark.questions(block)):
                if answered[number]:
                    continue
                if isinstance(question, RecordError):
                    part.write(number, unusable_row(number, question), error=True)
                    progress.count()
                else:
                    yield number, question

        def sample(question: BenchmarkQuestion) -> tuple[Sample, Path]:
            return question.sample, question.root or self.benchmark.root

        total = count_missing(numbers, answered)
        with TokenProgress(f"evaluating {self.benchmark.title}", total, "questions") as progress:
            for number, question, answer in numbered_answers(
                self.model,
                self.processor,
                usable(),
                sample,
                self.max_new_tokens,
                total=total,
                at_once=self.at_once,
                sampling=self.sampling,
                on_step=progress.count_tokens,
                context=context_of(self.model.config),
            ):
                if isinstance(answer, Answer):
                    part.write(number, self.row(number, question, answer))
                elif isinstance(answer, TesseraError) and str(answer.code).startswith(_OF_THE_MODEL):
                    part.write(number, self.row(number, question, None) | {"error": error_row(answer)})
                else:
                    part.write(number, unusable_row(number, answer, question.id), error=True)
                progress.count()

    def row(self, number: int, question: BenchmarkQuestion, answer: Answer | None) -> Row:
        """Return the row of an answer. `answer` None: the model could not answer, which counts as an empty answer."""
        text = "" if answer is None else answer.text
        mark = self.benchmark.metric.mark(text, question)
        return {
            "index": number,
            "id": question.id,
            "group": question.group,
            "categories": dict(question.categories),
            "prompt": prompt_text(question.sample)[:_MOST_PROMPT],
            "expected": list(question.expected),
            "answer": text,
            "extracted": mark.extracted,
            "values": dict(mark.values),
            "finish": "error" if answer is None else answer.finish.reason,
            "prompt_tokens": 0 if answer is None else answer.finish.prompt_tokens,
            "new_tokens": 0 if answer is None else answer.finish.new_tokens,
            **media_row(question.sample, question.root or self.benchmark.root),
            **self._regions(question, text),
        }

    def _regions(self, question: BenchmarkQuestion, answer: str) -> Row:
        """Return the expected boxes and points of a question, and those of its answer, in pixels of the image."""
        expected, size = question.fields.get("regions"), question.fields.get("region_size")
        if not expected:
            return {}
        inner = self.processor.processor
        read = []
        if isinstance(inner, VisionProcessor) and size is not None:
            points = any(len(region.numbers) == 2 for region in expected)
            read = inner.read_boxes(answer, size, points)
        both = {"expected": expected, "answer": read}
        return {
            "regions": [
                {"of": name, "image": expected[0].image, "numbers": list(region.numbers), "label": region.label}
                for name, regions in both.items()
                for region in regions
            ]
        }


def unusable_row(number: int, error: BaseException, id: str = "") -> Row:
    """Return the row of an unusable question, which is not asked. It has no mark and does not count in scores."""
    where = str(error.where or "") if isinstance(error, TesseraError) else ""
    return {"index": number, "id": id or where, "unusable": error_row(error)}


def media_row(sample: Sample, root: Path) -> Row:
    """Return a hash of a question's media files, which the hash of the table does not cover; empty without files."""
    content, count = hashlib.sha256(), 0
    for part in sample.media():
        value = part.value.value if isinstance(part.value, AudioClip) else part.value
        if isinstance(value, (str, ArchiveMember)):
            count += 1
            try:
                with opened(value, root, part.kind) as media:
                    for block in sampled_blocks(media.file, size_of(media.file)):
                        content.update(block)
            except TesseraError as error:  # `value` is not a file, such as a folder of frames or a URL
                content.update(str(error.code).encode())
    return {"media": content.hexdigest()[:16]} if count else {}


def prompt_text(sample: Sample) -> str:
    """Return the messages of a question as text, with a placeholder for each image, video and recording."""
    texts = []
    for message in sample.messages:
        words = "".join(part.spelled() if part.kind == "text" else f"[{part.kind}] " for part in message.parts)
        texts.append(words if message.role == "user" and len(sample.messages) == 1 else f"{message.role}: {words}")
    return "\n".join(texts)


def read_answers(path: Path) -> list[Row]:
    """Return the rows of an answers file that have an index, and numbers as values or the key `unusable`.

    Other rows, as in hostile files, are left out.
    """
    rows = []
    for row in read_jsonl(path):
        values = row.get("values")
        if type(row.get("index")) is not int or not ("unusable" in row or _are_numbers(values)):
            continue
        rows.append(row)
    return rows


def units_of(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the marked rows by unit: a unit is a group of questions, or a single question."""
    units: dict[str, list[Row]] = {}
    for row in rows:
        if "unusable" not in row:
            group = row.get("group")
            units.setdefault(f"group {group}" if group else f"question {row['index']}", []).append(row)
    return units


def _are_numbers(values: object) -> bool:
    return isinstance(values, Mapping) and all(
        isinstance(value, (int, float)) and abs(value) < LARGEST for value in values.values()
    )
