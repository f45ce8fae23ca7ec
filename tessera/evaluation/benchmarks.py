"""Score benchmarks of images and text by the TSV files of VLMEvalKit: AI2D, MMMU, ChartQA and DocVQA.

A file has a row per question, with the image in base64. AI2D and MMMU are multiple choice and compare option letters;
ChartQA accepts numbers within five percent; DocVQA scores the edit distance (ANLS).
"""

from __future__ import annotations

import base64
import binascii
import csv
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tessera.core.sample import Message, Part, Sample
from tessera.errors import TesseraError, nearest
from tessera.inference.answering import answer_texts
from tessera.inference.engine.request import GREEDY, Sampling
from tessera.inference.loaded import LoadedModel, LoadedProcessor
from tessera.runtime.progress import WorkProgress

SUFFIX = ".tsv"
LETTERS = "ABCDEFGHI"
MAX_FIELD = 64 << 20  # maximum bytes of a TSV cell; cells contain images in base64


@dataclass(frozen=True)
class Benchmark:
    """Define a benchmark: whether it is multiple choice, and how answers are scored from 0 to 1."""

    choice: bool
    score: Callable[[str, list[str]], float]


def _same(answer: str, expected: list[str]) -> float:
    return float(any(answer.strip().lower() == reference.strip().lower() for reference in expected))


def relaxed(answer: str, expected: list[str]) -> float:
    """Return 1 for an answer with the expected text, or with a number within five percent of an expected number."""

    def number(text: str) -> float | None:
        try:
            return float(text.strip().rstrip("%").replace(",", "")) / (100 if text.strip().endswith("%") else 1)
        except ValueError:
            return None

    for candidate in expected:
        value, wanted = number(answer), number(candidate)
        if value is not None and wanted is not None:
            if value == wanted or (wanted != 0 and abs(value - wanted) / abs(wanted) <= 0.05):
                return 1.0
        elif _same(answer, [candidate]):
            return 1.0
    return 0.0


def anls(answer: str, expected: list[str]) -> float:
    """Return the best of 1 - edit distance / length over the expected answers; 0 where that is below 0.5."""
    best = 0.0
    for candidate in expected:
        first, second = answer.strip().lower(), candidate.strip().lower()
        longest = max(len(first), len(second))
        best = max(best, 1.0 if not longest else 1 - _edit_distance(first, second) / longest)
    return best if best >= 0.5 else 0.0


def _edit_distance(first: str, second: str) -> int:
    row = list(range(len(second) + 1))
    for number, letter in enumerate(first, 1):
        previous, row[0] = row[0], number
        for position, other in enumerate(second, 1):
            cost = previous + (letter != other)
            previous, row[position] = row[position], min(cost, row[position] + 1, row[position - 1] + 1)
    return row[-1]


def chosen_letter(answer: str, options: Mapping[str, str]) -> str:
    """Return the letter of the option that an answer names, by letter or by text; empty if it names none."""
    match = re.match(rf"\W*([{LETTERS}])(?:\W|$)", answer.strip())
    if match and match[1] in options:
        return match[1]
    texts = [letter for letter, text in options.items() if text.strip().lower() == answer.strip().lower()]
    return texts[0] if len(texts) == 1 else ""


BENCHMARKS = {
    "ai2d_test": Benchmark(True, _same),
    "mmmu_dev_val": Benchmark(True, _same),
    "chartqa_test": Benchmark(False, relaxed),
    "docvqa_val": Benchmark(False, anls),
}


@dataclass(frozen=True)
class BenchmarkRow:
    """Hold one question of a benchmark."""

    index: str
    question: str
    images: tuple[bytes, ...]
    options: Mapping[str, str]
    expected: list[str]

    def prompt(self) -> tuple[Sample, Path]:
        """Return the question with its images. It names no files, so the root folder of media is not used."""
        parts = (*(Part("image", image) for image in self.images), Part("text", self.text))
        return Sample(self.index, (Message("user", parts),)), Path()

    @property
    def text(self) -> str:
        if not self.options:
            return f"{self.question}\nAnswer the question using a single word or phrase."
        listed = "\n".join(f"{letter}. {text}" for letter, text in self.options.items())
        return f"{self.question}\n{listed}\nAnswer with the option's letter from the given choices directly."


def read_rows(path: Path) -> Iterator[BenchmarkRow]:
    """Yield the questions of a TSV file. A row may contain the index of another row in place of its own image."""
    csv.field_size_limit(MAX_FIELD)
    images: dict[str, str] = {}
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file, delimiter="\t")
            missing = {"index", "question", "image", "answer"} - set(reader.fieldnames or ())
            if missing:
                raise TesseraError(
                    f"the table has no column {', '.join(sorted(missing))}",
                    where=str(path),
                    code="evaluation.unknown-columns",
                )
            for row in reader:
                cell, where = row["image"] or "", f"{path}: index {row['index']}"
                if len(cell) <= 64 and cell not in images:
                    raise TesseraError(
                        f"the image cell {cell!r} of this row is no image and no index of a row above it",
                        where=where,
                        fix="write the image in base64, or the index of a row above with the same image",
                        code="evaluation.image-not-base64",
                    )
                images[row["index"]] = cell if len(cell) > 64 else images[cell]
                yield BenchmarkRow(
                    row["index"],
                    row["question"],
                    tuple(_images(images[row["index"]], where)),
                    {letter: row[letter] for letter in LETTERS if row.get(letter)},
                    _answers(row["answer"]),
                )
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TesseraError(
            f"the table cannot be read: {error}", where=str(path), code="evaluation.unreadable-table"
        ) from None


def _images(text: str, where: str) -> Iterator[bytes]:
    """Yield the images in a TSV cell: one image in base64, or a list of images."""
    parts = re.findall(r"'([^']*)'|\"([^\"]*)\"", text) if text.startswith("[") else [(text, "")]
    for first, second in parts:
        try:
            yield base64.b64decode(first or second, validate=True)
        except (binascii.Error, ValueError):
            raise TesseraError(
                "the image of this row is not in base64", where=where, code="evaluation.image-not-base64"
            ) from None


def _answers(text: str) -> list[str]:
    """Return the accepted answers in a TSV cell: a JSON list, or one text."""
    if text.startswith("["):
        try:
            return [str(item) for item in json.loads(text.replace("'", '"'))]
        except ValueError:
            pass
    return [text]


def benchmark_of(name: str, where: str) -> Benchmark:
    """Return the benchmark with this name. Upper and lower case are equal."""
    if name.lower() not in BENCHMARKS:
        near = nearest(name.lower(), BENCHMARKS)
        raise TesseraError(
            f"there is no benchmark with the name {name!r}",
            where=where,
            allowed=BENCHMARKS,
            nearest=near,
            code="evaluation.unknown-benchmark",
        )
    return BENCHMARKS[name.lower()]


def score_table(
    model: LoadedModel,
    processor: LoadedProcessor,
    benchmark: Benchmark,
    table: Path,
    max_samples: int | None = None,
    max_new_tokens: int = 32,
    batch: int = 64,
    sampling: Sampling = GREEDY,
) -> list[dict[str, Any]]:
    """Generate answers to the questions of a table, and score them. `batch`: questions that are answered at once."""
    records: list[dict[str, Any]] = []
    total = min(sum(1 for _ in read_rows(table)), max_samples or sys.maxsize)
    rows = islice(read_rows(table), max_samples)
    with WorkProgress("evaluating", total, "questions") as progress:
        for row, answer in answer_texts(
            model, processor, rows, BenchmarkRow.prompt, max_new_tokens, total=total, at_once=batch, sampling=sampling
        ):
            chosen = chosen_letter(answer, row.options) if benchmark.choice and row.options else answer
            score = benchmark.score(chosen, row.expected)
            records.append({"index": row.index, "answer": answer, "expected": row.expected, "score": score})
            progress.count()
    if not records:
        raise TesseraError("the table has no rows", where=str(table), code="evaluation.empty-table")
    return records
