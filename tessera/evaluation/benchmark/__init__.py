"""Define a benchmark: questions with known answers, and how a model's answers are scored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tessera.core.sample import Sample
from tessera.data.sources.container import RecordError
from tessera.engine.request import Sampling

LARGEST = 1e300  # limit of the values of a mark: sums of larger values could overflow


@dataclass(frozen=True)
class BenchmarkQuestion:
    """Hold one question, its accepted answers, and further inputs of its metric."""

    id: str
    sample: Sample  # the messages to answer, with the prompt of the protocol
    expected: tuple[str, ...]
    # letter -> text of the option, for a multiple choice question
    options: Mapping[str, str] = field(default_factory=dict)
    # table of the report -> category, such as {"subject": "Art"}
    categories: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)  # further columns that the metric reads
    group: str = ""  # questions of a group count as one: `together` joins their marks. "": in no group
    root: Path | None = None  # folder of its media; None: the folder of the benchmark


@dataclass(frozen=True)
class Mark:
    """Hold the part of an answer that was scored, and its values by name.

    Figures of a benchmark are computed from the means of these values over all questions. A word error rate, for
    example, is the mean number of errors divided by the mean number of words. Missing values count as 0.
    """

    extracted: str | None  # None: the answer contains nothing that can be scored
    values: Mapping[str, float]


def together(marks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the values of a group of questions, such as one question with its options rotated: the minimum of each."""
    names = dict.fromkeys(name for values in marks for name in values)
    return {name: min(values.get(name, 0.0) for values in marks) for name in names}


@dataclass(frozen=True)
class AnswerMetric:
    """Score answers. `summary` returns figures from the means of values; the first figure is the score."""

    name: str
    mark: Callable[[str, BenchmarkQuestion], Mark]
    summary: Callable[[Mapping[str, float]], Mapping[str, float]] = dict
    higher_is_better: bool = True
    code: str = ""  # hash of the file of a user's function: a change of the code is a change of the protocol

    def score(self, values: Mapping[str, float]) -> float:
        """Return the score of a single answer: the first figure of `summary`. `values`: those of its `Mark`."""
        return float(next(iter(self.summary(values).values()), 0.0))

    def is_right(self, score: float) -> bool:
        """Return whether a report shows an answer with this score as right."""
        return score >= 0.5 if self.higher_is_better else score <= 0.5


class Benchmark(Protocol):
    """Declare the interface of benchmarks: published ones, and the held-out data of a run."""

    name: str
    variant: str  # the name of the protocol, such as "lmms-eval"
    title: str  # name, and the variant if it is not the default: mmmu, mmmu:qwen
    metric: AnswerMetric
    root: Path  # folder of media
    max_new_tokens: int
    sampling: Sampling

    def __len__(self) -> int: ...

    def questions(self, numbers: range) -> Iterator[tuple[int, BenchmarkQuestion | RecordError]]:
        """Yield consecutive questions with their index. An unusable row is yielded as a `RecordError`."""
        ...

    def protocol(self) -> dict[str, Any]:
        """Return everything that scores depend on as JSON: data hashes, prompt, extraction, metric, generation
        settings.
        """
        ...
