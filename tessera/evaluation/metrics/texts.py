"""Score short answers: equality, inclusion, numbers, edit distance and shared words.

A function `score_*` takes an answer and one or several expected answers, and returns a value from 0 to 1.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Literal

import numpy as np

from tessera.data.sources.container import RecordError
from tessera.errors import TesseraError
from tessera.evaluation.benchmark import AnswerMetric, BenchmarkQuestion, Mark

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+|(?<=\d)\.?)(?:[eE][-+]?\d+)?")
_RANGE = re.compile(r"(?<=\w)-")  # the hyphen of 2-3 is not the sign of a number
_FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | {0x3000: 0x20}


def plain_metric(name: str, score: Callable[[str, Sequence[str]], float]) -> AnswerMetric:
    """Return a metric of one value. It compares an answer with the expected answers and reads no other field."""

    def mark(answer: str, question: BenchmarkQuestion) -> Mark:
        return Mark(answer.strip() or None, {name: float(score(answer, question.expected))})

    return AnswerMetric(name, mark)


def edit_distance(first: Sequence[Hashable], second: Sequence[Hashable]) -> int:
    """Return the smallest number of insertions, deletions and substitutions between two texts or lists of words."""
    if len(first) < len(second):
        first, second = second, first
    numbers = {item: number for number, item in enumerate(dict.fromkeys((*first, *second)))}
    columns = np.arange(len(second) + 1)
    row, letters = columns, np.array([numbers[item] for item in second], dtype=np.int64)
    for count, item in enumerate(first, 1):
        best = np.minimum(row[1:] + 1, row[:-1] + (letters != numbers[item]))
        # An insertion adds 1 per column, so it is a running minimum of the values minus their column numbers.
        row = np.minimum.accumulate(np.concatenate(([count], best)) - columns) + columns
    return int(row[-1])


def without_case(text: str, *, punctuation: bool = True) -> str:
    text = text.strip().lower()
    return text if punctuation else text.translate(_PUNCTUATION)


def exact(*, ignore_case: bool = False, ignore_punctuation: bool = False) -> AnswerMetric:
    """Score 1 for an answer that equals an expected answer. White space at both ends is ignored."""

    def clean(text: str) -> str:
        text = text.strip().lower() if ignore_case else text.strip()
        return text.translate(_PUNCTUATION) if ignore_punctuation else text

    return plain_metric("accuracy", lambda answer, expected: clean(answer) in map(clean, expected))


def contains(*, ignore_case: bool = True) -> AnswerMetric:
    """Score 1 for an answer that contains an expected answer."""

    def clean(text: str) -> str:
        return text.strip().lower() if ignore_case else text.strip()

    return plain_metric("accuracy", lambda answer, expected: any(clean(text) in clean(answer) for text in expected))


def regex(*, pattern: str, ignore_case: bool = False) -> AnswerMetric:
    """Score 1 if the pattern, in which {expected} is an expected answer as plain text, is found in the answer.

    The pattern is from the task file. Patterns are never read from data: a hostile pattern could run forever.
    """
    checked_pattern(pattern.replace("{expected}", "x"), "metric.pattern")
    flags = re.IGNORECASE if ignore_case else 0

    def score(answer: str, expected: Sequence[str]) -> float:
        patterns = (pattern.replace("{expected}", re.escape(text.strip())) for text in expected)
        return any(re.search(each, answer, flags) for each in patterns)

    return plain_metric("accuracy", score)


def checked_pattern(pattern: str, where: str) -> re.Pattern[str]:
    """Compile a regular expression of a task file."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise TesseraError(
            f"not a regular expression: {pattern!r:.200} ({error})", where=where, code="evaluation.bad-pattern"
        ) from None


# ---------------------------------------------------------------------------------------------- numbers


def number_of(text: str) -> float | None:
    """Return a text as a finite number; None if it is none. `$`, `%` and commas between thousands are ignored."""
    match = NUMBER.fullmatch(text.strip().removeprefix("$").removesuffix("%").strip())
    value = float(match[0].replace(",", "")) if match else float("inf")
    return value if np.isfinite(value) else None


def last_number(text: str) -> float | None:
    """Return the last number of a text; None if it has none."""
    numbers = [value for match in NUMBER.finditer(text) if match[0] and (value := number_of(match[0])) is not None]
    return numbers[-1] if numbers else None


def numeric(*, tolerance: float = 0.0, relative: float = 0.0) -> AnswerMetric:
    """Score 1 if the last number of the answer is within `tolerance`, or within `relative` x the expected number.

    The answer and the expected answer are numbers, or texts whose last number counts.
    """

    def read(text: str) -> float | None:
        text = text.replace("\u2212", "-")  # the Unicode minus sign
        value = number_of(text)
        return last_number(_RANGE.sub(" ", text)) if value is None else value

    def mark(answer: str, question: BenchmarkQuestion) -> Mark:
        value = read(answer)
        wanted = [number for text in question.expected if (number := read(text)) is not None]
        if not wanted:
            raise RecordError(
                "the expected answer of the row has no number", where=question.id, code="evaluation.no-answer"
            )
        right = value is not None and any(abs(value - n) <= max(tolerance, relative * abs(n)) for n in wanted)
        return Mark(None if value is None else repr(value), {"accuracy": float(right)})

    return AnswerMetric("accuracy", mark)


def _percent_or_number(text: str) -> float | None:
    try:
        return float(text.rstrip("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return None


def score_relaxed(answer: str, expected: Sequence[str]) -> float:
    """Return 1 for a number within five percent of an expected number, or an equal text (ChartQA)."""
    answer = answer.strip()
    for text in map(str.strip, expected):
        value, wanted = _percent_or_number(answer), _percent_or_number(text)
        if value is not None and wanted:  # no number is within five percent of 0, so 0 is compared as text
            right = abs(value - wanted) / abs(wanted) <= 0.05
        else:
            right = answer.lower() == text.lower()
        if right:
            return 1.0
    return 0.0


def relaxed() -> AnswerMetric:
    return plain_metric("relaxed_accuracy", score_relaxed)


def gsm8k(*, pattern: str = r"The answer is (\-?[0-9\.\,]+).") -> AnswerMetric:
    """Score the number at the end of an answer: the last number, and as `strict` the first match of `pattern`."""
    strict = checked_pattern(pattern, "metric.pattern")

    def clean(text: str) -> str:
        for deleted in (r",", r"\$", r"(?s).*#### ", r"\.$"):
            text = re.sub(deleted, "", text)
        return text.lower()

    def mark(answer: str, question: BenchmarkQuestion) -> Mark:
        numbers = re.findall(r"-?[$0-9.,]{2,}|-?[0-9]+", answer)
        first = strict.search(answer)
        expected = {clean(text) for text in question.expected}
        values = {
            "flexible": float(bool(numbers) and clean(numbers[-1].strip()) in expected),
            "strict": float(first is not None and clean(first[1].strip()) in expected),
        }
        return Mark(numbers[-1] if numbers else None, values)

    return AnswerMetric("gsm8k", mark)


# ---------------------------------------------------------------------------------------------- words


def score_anls(answer: str, expected: Sequence[str], *, raw_length: bool = True) -> float:
    """Return the best of 1 - edit distance / length; 0 if it is below 0.5.

    `raw_length`: the length is that of the texts before runs of white space are collapsed.
    """
    best = 0.0
    for text in expected:
        first, second = (" ".join(each.strip().lower().split()) for each in (text, answer))
        sizes = (text.upper(), answer.upper()) if raw_length else (first, second)
        longest = max(map(len, sizes))
        best = max(best, 1 - edit_distance(first, second) / longest if longest else 1.0)
    return best if best >= 0.5 else 0.0


def anls(*, length: Literal["raw", "normalised"] = "raw") -> AnswerMetric:
    return plain_metric(
        "anls", lambda answer, expected: score_anls(answer.strip(), expected, raw_length=length == "raw")
    )


def score_f1(answer: str, expected: Sequence[str]) -> float:
    """Return the best F1 of shared words. Case, punctuation and English articles are ignored."""

    def words(text: str) -> Counter[str]:
        return Counter(_ARTICLES.sub(" ", without_case(text, punctuation=False)).split())

    def f1(first: Counter[str], second: Counter[str]) -> float:
        if not first or not second:
            return float(first == second)
        return 2 * (first & second).total() / (first.total() + second.total())

    return max((f1(words(answer), words(text)) for text in expected), default=0.0)


def token_f1() -> AnswerMetric:
    return plain_metric("f1", score_f1)


def ocrbench(*, fold: bool = True, math_column: str = "dataset", math_value: str = "HME100k") -> AnswerMetric:
    """Score 1 for an answer that contains an expected text.

    If the column `math_column` has the value `math_value`, the text is a formula: white space is deleted and case
    counts. `fold`: full-width letters equal ASCII letters in other texts.
    """

    def mark(answer: str, question: BenchmarkQuestion) -> Mark:
        formula = question.fields.get(math_column) == math_value

        def clean(text: str) -> str:
            if formula:
                return text.strip().replace("\n", " ").replace(" ", "")
            return (text.translate(_FULL_WIDTH) if fold else text).lower().strip().replace("\n", " ")

        right = any(clean(text) in clean(answer.strip()) for text in question.expected)
        return Mark(answer.strip() or None, {"accuracy": float(right)})

    return AnswerMetric("ocrbench", mark)
