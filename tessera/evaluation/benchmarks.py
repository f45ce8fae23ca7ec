"""Score a benchmark with a loaded model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tessera.core.sample import Sample
from tessera.data.sources.container import RecordError
from tessera.engine.request import Sampling
from tessera.errors import TesseraError, nearest
from tessera.evaluation.benchmark import Benchmark, BenchmarkQuestion, together
from tessera.evaluation.tasks.load import TaskBenchmark, open_task, published_files, task_of_file
from tessera.inference.answering import answer_texts
from tessera.inference.loaded import LoadedModel, LoadedProcessor
from tessera.runtime.progress import WorkProgress

SUFFIX = ".tsv"


def benchmark_of(name: str, table: Path, where: str) -> TaskBenchmark:
    """Open the table of a published benchmark. `name`: of its file, such as AI2D_TEST. Case does not matter."""
    task = task_of_file(name)
    if task is None:
        names = [Path(file).stem.lower() for file in published_files()]
        raise TesseraError(
            f"there is no benchmark with the name {name!r}",
            where=where,
            allowed=names,
            nearest=nearest(name.lower(), names),
            code="evaluation.unknown-benchmark",
        )
    return open_task(task, data=table, where=where)


def score_table(
    model: LoadedModel,
    processor: LoadedProcessor,
    benchmark: Benchmark,
    max_samples: int | None = None,
    max_new_tokens: int | None = None,
    batch: int = 64,
    sampling: Sampling | None = None,
) -> list[dict[str, Any]]:
    """Generate answers to the questions of a benchmark, and score them. `batch`: questions that are answered at once.

    Questions of a group give one record. An unusable row ends the evaluation.
    """
    total = min(len(benchmark), max_samples or sys.maxsize)

    def questions() -> Iterator[BenchmarkQuestion]:
        for _, question in benchmark.questions(range(total)):
            if isinstance(question, RecordError):
                raise question
            yield question

    def prompt(question: BenchmarkQuestion) -> tuple[Sample, Path]:
        return question.sample, benchmark.root

    groups: dict[str, list[dict[str, Any]]] = {}
    with WorkProgress("evaluating", total, "questions") as progress:
        for question, answer in answer_texts(
            model,
            processor,
            questions(),
            prompt,
            max_new_tokens or benchmark.max_new_tokens,
            total=total,
            at_once=batch,
            sampling=sampling or benchmark.sampling,
        ):
            mark = benchmark.metric.mark(answer, question)
            record = {"index": question.id, "answer": answer, "expected": list(question.expected), "mark": mark}
            groups.setdefault(question.group or f"id {question.id}", []).append(record)
            progress.count()
    records = []
    for group in groups.values():
        mark = together([record.pop("mark") for record in group])
        records.append({**group[0], "score": next(iter(benchmark.metric.summary(mark.values).values()))})
    return records
