"""Score answers against those of ten people (VQA, TextVQA), and yes or no (POPE)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal

from tessera.evaluation.benchmark import AnswerMetric, BenchmarkQuestion, Mark
from tessera.evaluation.metrics.texts import plain_metric

_MARKS = ';/[]"{}()=+\\_-><@`,?!'
_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_DIGITS = {word: str(number) for number, word in enumerate(_NUMBERS)} | {"none": "0"}
# Correct spellings. A word of an answer that lacks one of these apostrophes is replaced.
_SHORT_FORMS = """
ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd he'd've he's
how'd how'll how's isn't it'd it'd've it'll ma'am mightn't mightn't've might've mustn't must've needn't not've o'clock
oughtn't 'ow's'at shan't she'd've should've shouldn't shouldn't've somebody'd've somebody'll somebody's someone'd
someone'd've someone'll someone's something'd something'd've something'll that's there'd there'd've there're there's
they'd they'd've they'll they're they've 'twas wasn't we'd've we've weren't what'll what're what's what've when's
where'd where's where've who'd who'd've who'll who's who've why'll why're why's won't would've wouldn't wouldn't've
y'all y'all'll y'all'd've you'd you'd've you'll you're you've
"""
_CORRECTED = {
    form[: match.start()] + form[match.end() :]: form
    for form in _SHORT_FORMS.split()
    for match in re.finditer("'", form)
} | {"somebody'd": "somebodyd"}  # the published table has this mistake, too


def without_marks(text: str) -> str:
    """Delete punctuation, or replace it by a blank, as the evaluation of VQA does."""
    joined = re.search(r"(?<=\d),+(?=\d)", text) is not None
    out = text
    for mark in _MARKS:
        out = out.replace(mark, "" if joined or mark + " " in text or " " + mark in text else " ")
    return re.sub(r"\.(?!\d)", "", out, count=32)  # count=32 is in the published code


def normalised(text: str, *, words: bool = True) -> str:
    """Return an answer as the evaluation of VQA compares it.

    `words`: first delete commas and question marks, and separate genitives.
    """
    if words:
        text = text.lower().replace(",", "").replace("?", "").replace("'s", " 's").strip()
    text = without_marks(text.replace("\n", " ").replace("\t", " ").strip())
    numbers = (_DIGITS.get(word, word) for word in text.lower().split())
    return " ".join(_CORRECTED.get(word, word) for word in numbers if word not in ("a", "an", "the"))


def score_vqa(answer: str, expected: Sequence[str], *, words: bool = True) -> float:
    """Return the mean over all annotators of min(1, number of other annotators with this answer / 3).

    With one expected answer: 1 if the answer equals it.
    """
    wanted = [normalised(text, words=words) for text in expected]
    hits = [text == normalised(answer, words=words) for text in wanted]
    if len(hits) < 2:
        return float(any(hits))
    return sum(min(1.0, (sum(hits) - hit) / 3) for hit in hits) / len(hits)


def vqa(*, words: bool = True) -> AnswerMetric:
    return plain_metric("vqa_accuracy", lambda answer, expected: score_vqa(answer, expected, words=words))


def yes_no(*, rule: Literal["equal", "words"] = "equal", score: Literal["accuracy", "f1"] = "accuracy") -> AnswerMetric:
    """Score yes or no. `equal`: the answer is exactly one of the two; `words`: it has one of the two as a word.

    With `words`, an answer that is neither counts as no in precision and recall; with `equal` it counts in neither.
    """

    def mark(answer: str, question: BenchmarkQuestion) -> Mark:
        text, wanted = answer.lower().strip(), question.expected[0].lower().strip()
        if rule == "words":
            words = {"yes", "no"} & set(without_marks(text).split())
            text = words.pop() if len(words) == 1 else ""
        answered = text if text in ("yes", "no") else None
        missed = answered == "no" or (rule == "words" and answered is None)
        values = {
            "accuracy": answered == wanted,
            "true positives": answered == "yes" == wanted,
            "false positives": answered == "yes" and wanted == "no",
            "false negatives": wanted == "yes" and missed,
            "answered yes": answered == "yes",
            "expected yes": wanted == "yes",
            "answered neither": answered is None,
        }
        return Mark(answered, {name: float(value) for name, value in values.items()})

    def summary(means: Mapping[str, float]) -> dict[str, float]:
        right, wrong, missed = (means.get(f"{each}s", 0.0) for each in _OUTCOMES)
        figures = {
            "accuracy": means.get("accuracy", 0.0),
            "precision": right / (right + wrong) if right + wrong else 0.0,
            "recall": right / (right + missed) if right + missed else 0.0,
            "f1": 2 * right / (2 * right + wrong + missed) if right else 0.0,
            "yes_ratio": means.get("answered yes", 0.0),
            "expected_yes_ratio": means.get("expected yes", 0.0),
            "neither_ratio": means.get("answered neither", 0.0),
        }
        return {score: figures.pop(score), **figures}

    return AnswerMetric("yes_no", mark, summary)


_OUTCOMES = ("true positive", "false positive", "false negative")
