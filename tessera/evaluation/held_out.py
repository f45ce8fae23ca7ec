"""Make a benchmark of chat samples: the last answer of a sample is expected, and most metrics can score it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tessera.config.trust import Trust, check_trusted
from tessera.data.sources.container import RecordError
from tessera.data.sources.source import Source
from tessera.engine.request import GREEDY
from tessera.errors import TesseraError, few_names
from tessera.evaluation.benchmark import AnswerMetric, BenchmarkQuestion
from tessera.evaluation.metrics.registry import METRICS, is_code, metric_of
from tessera.inference.questions import Question, question_of

DEFAULT_METRIC = "exact"
HELD_OUT = "held-out"  # name of the held-out set of a run
_REFUSED = ("ifeval", "mathvista", "choice", "mmmu")  # metrics that read columns which chat samples do not have


class HeldOutBenchmark:
    """Read the questions of chat samples. Expected boxes are written in the format of the model.

    The report has a row for each number of images per question.
    """

    variant = ""
    sampling = GREEDY
    max_new_tokens = 32

    def __init__(
        self,
        name: str,
        sources: Sequence[Source],
        processor: object = None,
        metric: str = DEFAULT_METRIC,
        folder: Path | None = None,
        where: str = "--metric",
    ) -> None:
        """`processor`: writes boxes as the model does.

        `folder`: contains the file of a user's metric, which is trusted already.
        """
        self.name = self.title = name
        self._sources, self._processor = sources, processor
        self._chosen = {"name": metric, "options": {}}
        self.root = sources[0].root
        self.metric: AnswerMetric = metric_of(metric, where=where, references=self._references, folder=folder)

    def __len__(self) -> int:
        return sum(map(len, self._sources))

    def questions(self, numbers: range) -> Iterator[tuple[int, BenchmarkQuestion | RecordError]]:
        """Yield consecutive questions with their index. An unusable row is yielded as a `RecordError`."""
        for number, question in self.samples(numbers):
            if isinstance(question, RecordError):
                yield number, question
                continue
            yield number, self.scored(question)

    def scored(self, question: Question) -> BenchmarkQuestion | RecordError:
        """Convert a question to a `BenchmarkQuestion`, or return the reason why the metric cannot score its answers."""
        benchmark_question = BenchmarkQuestion(
            question.sample.id,
            question.sample,
            (question.expected,),
            categories={"images": question.group},
            fields={"regions": question.regions, "region_size": question.size},
            root=question.root,
        )
        try:
            # Score an empty answer to find errors of the sample. Functions of users need not accept one.
            if not is_code(self.metric.name):
                self.metric.mark("", benchmark_question)
        except RecordError as error:
            return error
        return benchmark_question

    def samples(self, numbers: range) -> Iterator[tuple[int, Question | RecordError]]:
        """Yield consecutive samples with their index."""
        begin = 0
        for source in self._sources:
            first, last = max(numbers.start, begin) - begin, min(numbers.stop, begin + len(source)) - begin
            if first < last:
                for at, sample in source.scan(range(first, last)):
                    yield begin + at, question_of(sample, source.root, self._processor)
            begin += len(source)

    def protocol(self) -> dict[str, Any]:
        """Return all settings that affect the scores, as a JSON mapping."""
        return {
            "task": self.name,
            "variant": self.variant,
            "data": {"source": few_names([source.path.name for source in self._sources]), "sha256": self._content},
            "metric": self._chosen | ({"code": self.metric.code} if self.metric.code else {}),
            "max_new_tokens": self.max_new_tokens,
        }

    @cached_property
    def _content(self) -> str:
        """Return a hash of all messages and names of media. Their folder does not matter."""
        digest = hashlib.sha256()
        for source in self._sources:
            for _, sample in source.scan(range(len(source))):
                messages = () if isinstance(sample, RecordError) else sample.messages
                digest.update(f"{len(messages)}\n".encode())
                for message in messages:
                    for part in message.parts:
                        value = part.value if isinstance(part.value, (str, bytes)) else type(part.value).__name__
                        content = value if isinstance(value, bytes) else value.encode("utf-8", "surrogatepass")
                        digest.update(f"{message.role} {part.kind} {len(content)}\n".encode() + content)
        return digest.hexdigest()[:16]

    def _references(self) -> Iterator[list[str]]:
        for _, question in self.samples(range(len(self))):
            yield [] if isinstance(question, RecordError) else [question.expected]


def held_out_benchmark(
    name: str,
    sources: Sequence[Source],
    processor: object,
    metric: str | None,
    where: str,
    trust: Trust,
    folder: Path | None = None,
) -> HeldOutBenchmark:
    """Return the benchmark of chat samples.

    `metric`: a name, or `file.py:function` with a path relative to the working folder; None: `exact`. `folder`: the
    folder of the run whose recipe sets the metric; None: the command or the caller sets it.
    """
    chosen, base = metric or DEFAULT_METRIC, None
    check_metric(chosen, where)
    if is_code(chosen):
        path, _, function = chosen.rpartition(":")
        if path.endswith(".py"):
            base = Path(path).parent
            chosen = f"{Path(path).name}:{function}"
        check_trusted(folder or base or Path(), {metric or "": where}, trust)
    return HeldOutBenchmark(name, sources, processor, chosen, folder=base, where=where)


def check_metric(name: str, where: str) -> None:
    """Raise for a metric that cannot score chat samples, before any data is opened."""
    if is_code(name):
        return
    if name in _REFUSED:
        raise TesseraError(
            f"the metric {name} reads columns that chat samples do not have",
            where=where,
            allowed=[each for each in METRICS if each not in _REFUSED],
            fix="write a task file, which names the columns: docs/reference/benchmarks.md",
            code="evaluation.unknown-metric",
        )
    if name not in METRICS:
        metric_of(name, where=where)  # raises an error for an unknown name
