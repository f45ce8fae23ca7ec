"""Score answers of several types: MMMU's open questions, and MathVista's choices, numbers and lists."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from tessera.evaluation.benchmark import AnswerMetric, BenchmarkQuestion, Mark
from tessera.evaluation.metrics.choice import by_mmmu, by_vlmevalkit
from tessera.evaluation.metrics.judge import Judge, judge_of_environment
from tessera.evaluation.metrics.texts import edit_distance, last_number

# Phrases before a conclusion. An equals sign counts only in the last line.
_BEFORE_CONCLUSIONS = ("could be ", "so ", "is ", "thus ", "therefore ", "final ", "answer ", "result ")
_NUMBERS = (
    r"-?\b\d{1,3}(?:,\d{3})+\b",
    r"-?\d+(?:\.\d+)?[eE][+-]?\d+",
    r"-?(?:\d+\.\d+|\.\d+|\d+\b)(?![eE][+-]?\d+)(?![,\d])",
)
OTHER = "Other Answers"


def _comparable(text: str) -> list[str | float]:
    """Return a number rounded to two digits, or a text in lower case. A single letter gets a blank beside it."""
    text = text.strip()
    try:
        return [round(float(text.replace(",", "")), 2)]
    except ValueError:
        lower = text.lower()
        return [f" {lower}", f"{lower} "] if len(lower) == 1 else [lower]


def conclusions(answer: str) -> list[str | float]:
    """Return the final texts of an open answer, and the numbers in them.

    In each line it is the shortest text after a phrase such as "so" or "the answer is". If no line has such a phrase,
    it is the whole answer.
    """
    answer = answer.strip().strip(".").lower()
    *others, last = answer.split("\n")
    ends: list[str] = []
    for line, marks in (*((line, _BEFORE_CONCLUSIONS) for line in others), (last, (*_BEFORE_CONCLUSIONS, "="))):
        tails = [line.rsplit(mark, 1)[-1].strip() for mark in marks if mark in line]
        shortest = ""
        for tail in tails:
            if not shortest or len(tail) < len(shortest):
                shortest = tail
        if shortest and shortest not in (":", ",", ".", "!", "?", ";", "'"):
            ends.append(shortest)
    ends = ends or [answer]
    numbers = [number for end in ends for pattern in _NUMBERS for number in re.findall(pattern, end)]
    return list(dict.fromkeys(value for text in (*ends, *numbers) for value in _comparable(text)))


def score_open(answer: str, expected: Iterable[str]) -> float:
    """Return 1 if a conclusion contains an expected text, or is an expected number."""
    wanted = [value for text in expected for value in _comparable(text)]
    for value in conclusions(answer):
        if isinstance(value, str):
            if any(isinstance(text, str) and text in value for text in wanted):
                return 1.0
        elif value in wanted:
            return 1.0
    return 0.0


def mmmu(*, rule: Literal["lmms-eval", "vlmevalkit"] = "lmms-eval") -> AnswerMetric:
    """Score MMMU: questions with options by their letter, and open questions.

    `vlmevalkit`: an open question has the options A, its answer, and B, "Other Answers".
    """

    def mark(answer: str, question: BenchmarkQuestion) -> Mark:
        if rule == "vlmevalkit":
            options = question.options or {"A": question.expected[0], "B": OTHER}
            letter = by_vlmevalkit(answer.strip(), options)
            return Mark(letter, {"accuracy": float(letter == (question.expected[0] if question.options else "A"))})
        if question.options:
            letter = by_mmmu(answer.strip(), question.options, question.id)
            return Mark(letter, {"accuracy": float(letter == question.expected[0])})
        extracted = "; ".join(map(str, conclusions(answer))) or None
        return Mark(extracted, {"accuracy": score_open(answer, question.expected)})

    return AnswerMetric("mmmu", mark)


# ---------------------------------------------------------------------------------------------- MathVista


_ASK = """\
Below are a question, with a hint on the form of its answer, and a response to it. Write down the final answer that the
response gives, in the form that the hint asks for: an option letter, a number or a Python list. Write nothing else. If
the response gives no answer, write NONE.

{query}

Response: {answer}

Final answer:"""


def _digits(question: BenchmarkQuestion) -> int:
    try:
        return int(float(question.fields.get("precision") or 0))
    except (TypeError, ValueError):
        return 0


def _try(convert: Callable[[str], str], text: str) -> str | None:
    try:
        return convert(text)
    except (ValueError, OverflowError):
        return None


def normalise_math(text: str, question: BenchmarkQuestion) -> str | None:
    """Return an extracted answer in the form of the expected one: a choice's text, an integer, a rounded number.

    A text that is not a choice is replaced by the choice with the smallest edit distance.
    """
    kind = question.fields.get("answer_type")
    if question.fields.get("question_type") == "multi_choice":
        text, choices = text.strip(), list(question.options.values())
        letter = re.search(r"\(([a-zA-Z])\)", text)
        text = letter[1].upper() if letter else text
        if text in question.options:
            return question.options[text]
        return min(choices, key=lambda each: edit_distance(text, each)) if choices else None
    if kind == "integer":
        return _try(lambda text: str(int(float(text))), text)
    if kind == "float":
        return _try(lambda text: str(round(float(text), _digits(question))), text)
    return text


def _extract_published(answer: str, question: BenchmarkQuestion) -> str | None:
    """Return an answer that is a choice or a number, and nothing else; None for all others."""
    kind = question.fields.get("answer_type")
    if question.fields.get("question_type") == "multi_choice" and answer in question.options.values():
        return answer
    if kind == "integer" and (number := _try(lambda text: str(int(text)), answer)) is not None:
        return number
    if kind == "float":
        return _try(lambda text: str(float(text)), answer)
    return None


def _extract_vlmevalkit(answer: str, question: BenchmarkQuestion) -> str | None:
    """Return the option that an answer names, or an answer that is only a number."""
    if question.fields.get("question_type") == "multi_choice":
        return by_vlmevalkit(answer, question.options)
    return _extract_published(answer, question)


def _extract_last(answer: str, question: BenchmarkQuestion) -> str | None:
    """Return the named option, or the last number or list of an answer."""
    if question.fields.get("question_type") == "multi_choice":
        return by_vlmevalkit(answer, question.options)
    if question.fields.get("answer_type") == "list":
        lists = re.findall(r"\[[^\[\]]*\]", answer)
        return str(lists[-1]) if lists else None
    if question.fields.get("answer_type") in ("integer", "float"):
        value = last_number(answer)
        return None if value is None else repr(value)
    return answer or None


def _is_right(text: str | None, question: BenchmarkQuestion) -> bool:
    return text is not None and text.strip() in {expected.strip() for expected in question.expected}


def _sensible(reply: str, question: BenchmarkQuestion) -> bool:
    """Return whether a judge's reply has the form of an answer to this question."""
    if not reply or len(reply) > 200:
        return False
    if question.fields.get("question_type") == "multi_choice":
        letter = re.fullmatch(r"\(?([A-Za-z])\)?\.?", reply)
        return reply in question.options.values() or (letter is not None and letter[1].upper() in question.options)
    if question.fields.get("answer_type") in ("integer", "float"):
        return _try(lambda text: str(int(float(text))), reply) is not None
    return True


def mathvista(
    *, rule: Literal["published", "vlmevalkit", "last"] = "published", judge: bool = False, prompt: str = _ASK
) -> AnswerMetric:
    """Score MathVista by type and precision of the answer.

    `published`: an answer that is not only a choice or a number is given to the judge; without a judge it counts as
    empty. `vlmevalkit`: the same, but an option may be named in any way. `last`: the named option, or the last
    number or list, counts. `judge`: ask the language model that the environment names.
    """
    asked_judge: Judge | None = judge_of_environment() if judge else None
    extract: Mapping[str, Callable[[str, BenchmarkQuestion], str | None]] = {
        "published": _extract_published,
        "vlmevalkit": _extract_vlmevalkit,
        "last": _extract_last,
    }

    def mark(answer: str, question: BenchmarkQuestion) -> Mark:
        answer = answer.strip()
        text = extract[rule](answer, question) if answer else None
        values: dict[str, float] = {}
        if text is None and answer and asked_judge is not None:
            query = question.fields.get("query") or question_text(question)
            reply = asked_judge.ask(prompt.replace("{query}", str(query)).replace("{answer}", answer))
            nonsense = reply is not None and reply != "NONE" and not _sensible(reply, question)
            text = reply if reply is not None and reply != "NONE" and not nonsense else None
            values = {"judged": 1.0, "judge failed": float(reply is None), "judge nonsense": float(nonsense)}
        right = _is_right(normalise_math(text or "", question), question)
        return Mark(text, {"accuracy": float(right), **values})

    return AnswerMetric("mathvista" if asked_judge is None else f"mathvista, judge {asked_judge.model}", mark)


def question_text(question: BenchmarkQuestion) -> str:
    """Return the texts of a question, without its media."""
    parts: Sequence[Any] = [part for message in question.sample.messages for part in message.parts]
    return "\n".join(part.value for part in parts if part.kind == "text")
