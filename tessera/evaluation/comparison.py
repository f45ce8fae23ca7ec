"""Compare the results of two evaluations: a paired test on the same questions, or the reason why it means nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessera.errors import TesseraError, printable
from tessera.evaluation.answers import Row, read_answers
from tessera.evaluation.benchmark import AnswerMetric, Mark
from tessera.evaluation.intervals import PairedTest, paired_test
from tessera.evaluation.metrics.registry import is_code, metric_of
from tessera.evaluation.protocol import compared, lines_of, protocol_differences
from tessera.evaluation.run import RESULTS, read_results
from tessera.evaluation.scores import unit_values

Result = Mapping[str, Any]


@dataclass(frozen=True)
class TaskComparison:
    """Hold the comparison of two results of a benchmark."""

    title: str
    results: tuple[Result, Result]
    folders: tuple[Path, Path]
    differences: list[str]  # settings in which the protocols differ
    test: PairedTest | None  # None: the numbers cannot be compared

    def lines(self) -> list[str]:
        """Return the comparison as text for a terminal."""
        if self.test is None:
            out = [f"{self.title}: these two numbers cannot be compared", *(f"  {line}" for line in self.differences)]
            return _for_terminal(out)
        name, scores = self.results[0]["metric"], [result["score"] for result in self.results]
        test = self.test
        low_high = f"95 % interval {test.low:+.4f} to {test.high:+.4f}"
        verdict = "different" if test.p < 0.05 else "no difference shown"
        return _for_terminal(
            [
                f"{self.title}: {name} {scores[0]:.4f} -> {scores[1]:.4f}, difference {test.value:+.4f}, {low_high}",
                f"  {verdict}: p = {test.p:.3g} ({test.test}, {test.units} questions: {test.better} higher, "
                f"{test.worse} lower)",
                *(f"  differs: {line}" for line in self.differences),
            ]
        )


def _for_terminal(lines: Sequence[str]) -> list[str]:
    return [printable(line.replace("\n", " ")) for line in lines]


def compare_results(first: Path, second: Path, *, anyway: bool = False) -> list[TaskComparison]:
    """Compare the benchmarks that two folders have in common. Raise if none can be compared.

    `anyway`: also compare results whose protocols differ, on the questions that both have.
    """
    results = [_results(folder) for folder in (first, second)]
    titles = _common(results[0], results[1])
    if not titles:
        raise TesseraError(
            "the two evaluations have no benchmark in common",
            where=f"{first} {second}",
            allowed=[*results[0], *results[1]],
            fix="evaluate both models on the same benchmarks: tessera eval MODEL --tasks NAME",
            code="evaluation.nothing-in-common",
        )
    comparisons = [
        _compared(title, (results[0][title], results[1][other]), (first, second), anyway)
        for title, other in titles.items()
    ]
    if all(each.test is None for each in comparisons):
        reasons = [f"{each.title}: {line}" for each in comparisons for line in each.differences]
        raise TesseraError(
            "these two numbers cannot be compared: " + "; ".join(reasons),
            where=f"{first} {second}",
            fix="evaluate both models with the same protocol; --anyway compares them nevertheless",
            code="evaluation.not-comparable",
        )
    return comparisons


def _common(first: Mapping[str, Result], second: Mapping[str, Result]) -> dict[str, str]:
    """Return the benchmarks that two evaluations have in common: by title, by equal questions and scoring, or by task.

    The keys are titles of the first evaluation, the values titles of the second one.
    """
    titles = {title: title for title in first if title in second}
    for title in (title for title in first if title not in titles):
        task = compared(first[title]["protocol"])["task"]
        rest = (name for name in second if name not in titles.values())
        same = next((name for name in rest if compared(second[name]["protocol"])["task"] == task), None)
        titles |= {} if same is None else {title: same}
    variants = [
        {str(result["protocol"]["task"].get("task")): title for title, result in results.items() if title not in paired}
        for results, paired in ((first, titles), (second, titles.values()))
    ]  # different variants of a task: only --anyway compares their scores
    return titles | {title: variants[1][task] for task, title in variants[0].items() if task in variants[1]}


def metric_of_result(result: Result) -> AnswerMetric:
    """Return the metric of a result, to compute its figures again. Functions of a user are not imported."""
    chosen = result.get("protocol", {}).get("task", {}).get("metric")
    name, options = (chosen.get("name"), chosen.get("options", {})) if isinstance(chosen, dict) else (chosen, {})
    if not isinstance(name, str) or is_code(name):
        return AnswerMetric(str(name), lambda answer, question: Mark(None, {}))
    # the stored marks are used: no judge is asked again
    options = {key: value for key, value in options.items() if key != "judge"}
    return metric_of(name, options, where=RESULTS)


def pairs_of(first: list[Row], second: list[Row]) -> list[tuple[Row, Row]]:
    """Return the answers, as pairs, to the questions that both evaluations have scored."""
    others = {(row["index"], row.get("id")): row for row in second if "unusable" not in row}
    marked = ((row, others.get((row["index"], row.get("id")))) for row in first if "unusable" not in row)
    return [(row, other) for row, other in marked if other is not None and row.get("expected") == other.get("expected")]


def _compared(title: str, results: tuple[Result, Result], folders: tuple[Path, Path], anyway: bool) -> TaskComparison:
    differences = lines_of(protocol_differences(results[0]["protocol"], results[1]["protocol"]))
    if differences and not anyway:
        return TaskComparison(title, results, folders, differences, None)
    rows = [read_answers(answers_of(folder, result)) for folder, result in zip(folders, results, strict=True)]
    pairs = pairs_of(rows[0], rows[1])
    if not pairs:
        return TaskComparison(title, results, folders, [*differences, "no question in common"], None)
    metric = metric_of_result(results[0])
    values = [unit_values([pair[side] for pair in pairs]) for side in (0, 1)]
    units = [unit for unit in values[0] if unit in values[1]]
    test = paired_test(
        [values[0][unit] for unit in units], [values[1][unit] for unit in units], metric.summary, results[0]["metric"]
    )
    if len(pairs) < max(result["questions"] for result in results):
        differences = [*differences, f"only {len(pairs)} questions have a mark in both"]
    return TaskComparison(title, results, folders, differences, test)


def answers_of(folder: Path, result: Result) -> Path:
    """Return the path of the answers of a result, which must be in its folder."""
    name = str(result.get("answers"))
    if Path(name).name != name or not (folder / name).is_file():
        raise TesseraError(
            "the answers of this evaluation are missing",
            where=str(folder / Path(name).name),
            fix="run the evaluation again",
            code="evaluation.no-results",
        )
    return folder / name


_FIELDS: Mapping[str, Callable[[Any], bool]] = {
    "metric": lambda value: isinstance(value, str),
    "score": lambda value: isinstance(value, (int, float)),
    "questions": lambda value: isinstance(value, int),
    "protocol": lambda value: isinstance(value, dict) and isinstance(value.get("task"), dict),
}


def _results(folder: Path) -> dict[str, dict[str, Any]]:
    results = read_results(folder)
    for title, result in results.items():
        for name, fits in _FIELDS.items():
            if not fits(result.get(name)):
                raise TesseraError(
                    f"the result of {title!r:.100} has no usable {name!r}",
                    where=str(folder / RESULTS),
                    fix="run the evaluation again",
                    code="evaluation.no-results",
                )
    if not results:
        raise TesseraError(
            f"{folder} has no results of an evaluation",
            where="--compare",
            fix="name folders that `tessera eval` has written",
            code="evaluation.no-results",
        )
    return results
