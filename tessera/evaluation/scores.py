"""Compute the figures of a benchmark from its answers: scores with intervals, tables by category, cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tessera.errors import printable
from tessera.evaluation.answers import Row, units_of
from tessera.evaluation.benchmark import together
from tessera.evaluation.intervals import Estimate, Summary, estimates
from tessera.evaluation.protocol import compared, short_hash

MOST_CATEGORIES = 200  # tables with more different values are left out: they are ids, not categories


@dataclass(frozen=True)
class Cost:
    """Count the time and the tokens of an evaluation.

    Seconds are those of the last start; tokens are those of all answers.
    """

    prompt_tokens: int
    new_tokens: int
    seconds: float
    answered: int  # number of questions that the last start answered on this rank
    fresh_tokens: int  # estimate of the generated tokens of those answers

    def line(self) -> str:
        rate = f", {self.fresh_tokens / self.seconds:,.0f} tokens/s" if self.seconds and self.fresh_tokens else ""
        return f"{self.prompt_tokens:,} tokens read, {self.new_tokens:,} generated, {self.seconds:,.0f} s{rate}"


@dataclass(frozen=True)
class Category:
    """Hold the figures of the questions of one category."""

    questions: int
    figures: Mapping[str, Estimate]


@dataclass(frozen=True)
class TaskResult:
    """Hold the result of a benchmark."""

    title: str
    protocol: Mapping[str, Any]
    figures: Mapping[str, Estimate]  # the first figure is the score
    categories: Mapping[str, Mapping[str, Category]]  # table -> value of the category -> its figures
    units: int  # number of questions, or of groups that count as one question
    questions: int  # number of questions with a mark
    unusable: int  # number of unusable questions, which were not asked and do not count
    unanswered: int  # number of questions that the model could not answer, such as too long ones: marked as empty
    first_problem: str  # reason of the first unusable question
    first_refusal: str  # reason of the first question that the model could not answer
    higher_is_better: bool
    answers: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    cost: Cost | None = None

    @property
    def metric(self) -> str:
        """Return the name of the figure that is the score."""
        return next(iter(self.figures))

    @property
    def score(self) -> Estimate:
        return self.figures[self.metric]

    @property
    def fingerprint(self) -> str:
        """Return a short hash of all settings that two comparable results must share."""
        return short_hash(compared(self.protocol))

    def lines(self) -> list[str]:
        """Return the result as text for a terminal."""
        score, name = self.score, self.metric
        interval = f"95 % interval {score.low:.4f} to {score.high:.4f}"
        without = f" ({self.unanswered} without an answer)" if self.unanswered else ""
        out = [f"{self.title}: {name} {score.value:.4f} over {self.units} questions{without}, {interval}"]
        others = [f"{other} {each.value:.4f}" for other, each in self.figures.items() if other != name]
        out += [f"  {', '.join(others)}"] if others else []
        for table, categories in self.categories.items():
            shown_values = list(categories.items())[:12]
            for value, category in shown_values if len(categories) > 1 else ():
                each = category.figures[name]
                out.append(f"  {value}: {each.value:.4f} of {category.questions}, {each.low:.4f} to {each.high:.4f}")
            if len(categories) > len(shown_values):
                out.append(f"  and {len(categories) - len(shown_values)} more values of {table}")
        if self.unusable:
            out.append(f"  {self.unusable} questions could not be asked and do not count: {self.first_problem}")
        if self.unanswered:
            count = f"{self.unanswered} questions could not be answered and count as empty answers"
            out.append(f"  {count}: {self.first_refusal}")
        if self.cost is not None:
            out.append(f"  {self.cost.line()}")
        return [printable(line.replace("\n", " ")) for line in (*out, f"  protocol {self.fingerprint}")]

    def facts(self) -> dict[str, Any]:
        """Return the result as a JSON mapping."""

        def figures(of: Mapping[str, Estimate]) -> dict[str, Any]:
            return {name: asdict(each) for name, each in of.items()}

        return {
            "task": self.title,
            "metric": self.metric,
            "score": self.score.value,
            "interval": [self.score.low, self.score.high],
            "higher_is_better": self.higher_is_better,
            "questions": self.questions,
            "units": self.units,
            "unusable": self.unusable,
            "unanswered": self.unanswered,
            "first_refusal": self.first_refusal,
            "figures": figures(self.figures),
            "categories": {
                table: {
                    value: {"questions": each.questions, "figures": figures(each.figures)}
                    for value, each in categories.items()
                }
                for table, categories in self.categories.items()
            },
            "fingerprint": self.fingerprint,
            "protocol": self.protocol,
            "environment": self.environment,
            "cost": None if self.cost is None else asdict(self.cost),
            "answers": self.answers.name,
        }


def unit_values(rows: Sequence[Row]) -> dict[str, Mapping[str, float]]:
    """Return the values of each unit (a question, or a group of questions), joined from the marks of its rows."""
    return {unit: together([row["values"] for row in members]) for unit, members in units_of(rows).items()}


def category_tables(rows: Sequence[Row], summary: Summary) -> dict[str, dict[str, Category]]:
    """Return the figures by category: a table for each name. A group has the categories of its first question."""
    values, tables = unit_values(rows), dict[str, dict[str, list[str]]]()
    for unit, members in units_of(rows).items():
        categories = members[0].get("categories")
        for table, value in categories.items() if isinstance(categories, dict) else ():
            if value != "":
                tables.setdefault(str(table), {}).setdefault(str(value), []).append(unit)
    return {
        table: {
            value: Category(len(units), estimates([values[unit] for unit in units], summary))
            for value, units in sorted(by_value.items())
        }
        for table, by_value in tables.items()
        if len(by_value) <= MOST_CATEGORIES
    }
