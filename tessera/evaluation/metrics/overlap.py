"""Score longer texts: error rates of words and characters, BLEU, and CIDEr.

BLEU and the error rates are ratios of sums over all questions, so a mark holds the terms of the sums.
"""

from __future__ import annotations

import functools
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, cast

from tessera.evaluation.benchmark import AnswerMetric, BenchmarkQuestion, Mark
from tessera.evaluation.metrics.texts import edit_distance

Grams = Counter[tuple[str, ...]]
References = Callable[[], Iterable[Sequence[str]]]

_SIGMA = 6.0  # CIDEr: standard deviation of the Gaussian penalty for an answer of another length
# Characters of writing systems without blanks between words are words of their own.
_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+(?:['’][^\W{_UNSPACED}]+)*")
# Begin and end of texts that Whisper's normaliser removes: <laughs>, [noise] and (coughs), but not ().
_ASIDES = ((re.compile(r"[<\[]"), re.compile(r"[>\]]")), (re.compile(r"\((?=[^)])"), re.compile(r"\)")))
_TOKEN = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+|[^\w\s]")


def spoken(text: str) -> str:
    """Normalize a text for comparison by ear: NFKC, no case, no punctuation, and single spaces between words."""
    text = unicodedata.normalize("NFKC", text).casefold().replace("’", "'")
    return " ".join(_WORD.findall(text))


def whisper_basic(text: str) -> str:
    """Return a text as Whisper's basic normaliser does, for comparison with published error rates.

    Text in brackets and parentheses is left out. Marks, symbols and punctuation are blanks, apostrophes too.
    """
    for begin, end in _ASIDES:
        text = _without(text.lower(), begin, end)
    letters = (" " if unicodedata.category(char)[0] in "MSP" else char for char in unicodedata.normalize("NFKC", text))
    return " ".join("".join(letters).lower().split())


def whisper_english(text: str) -> str:
    """Return an English text as Whisper's English normaliser does: numbers as digits, titles and short forms in full.

    The normaliser's list of British spellings is a file in Whisper's folders. It is not used here.
    """
    for begin, end in _ASIDES:
        text = _without(text.lower(), begin, end)
    # On opening brackets without an end and on runs of blanks, transformers' patterns take quadratic time.
    text = re.sub(r"[<(\[\s]+", " ", text)
    try:
        return str(_english_normaliser()(text)).strip()
    except ValueError:  # Python refuses to convert numbers of thousands of digits
        return whisper_basic(text)


@functools.cache
def _english_normaliser() -> Callable[[str], str]:
    from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

    return cast(Callable[[str], str], EnglishTextNormalizer({}))


def _without(text: str, begin: re.Pattern[str], end: re.Pattern[str]) -> str:
    """Remove the text between matches of two patterns, in linear time."""
    pieces, at = [], 0
    while (first := begin.search(text, at)) and (last := end.search(text, first.end())):
        pieces.append(text[at : first.start()])
        at = last.end()
    return "".join(pieces) + text[at:]


_NORMALISED: Mapping[str, Callable[[str], str]] = {
    "spoken": spoken,
    "whisper": whisper_basic,
    "whisper-english": whisper_english,
    "none": str,
}
Normalisation = Literal["spoken", "whisper", "whisper-english", "none"]


def _error_rate(name: str, pieces: Callable[[str], Sequence[str]]) -> AnswerMetric:
    def mark(answer: str, question: BenchmarkQuestion) -> Mark:
        spelled = pieces(answer)
        counts = [(edit_distance(spelled, wanted), len(wanted)) for wanted in map(pieces, question.expected)]
        errors, length = min(counts, key=lambda each: each[0] / max(1, each[1]))
        return Mark(answer.strip() or None, {"errors": float(errors), "length": float(length)})

    def summary(means: Mapping[str, float]) -> dict[str, float]:
        return {name: means["errors"] / means["length"] if means.get("length") else float(means["errors"] > 0)}

    return AnswerMetric(name, mark, summary, higher_is_better=False)


def wer(*, normalise: Normalisation = "spoken") -> AnswerMetric:
    """Return the number of wrong, missing and added words divided by the number of expected words."""
    return _error_rate("wer", lambda text: _NORMALISED[normalise](text).split())


def cer(*, normalise: Normalisation = "spoken", blanks: bool = False) -> AnswerMetric:
    """Return the number of wrong, missing and added characters divided by that of expected characters.

    `blanks`: whether white space counts.
    """

    def characters(text: str) -> str:
        text = _NORMALISED[normalise](text)
        return text if blanks else "".join(text.split())

    return _error_rate("cer", characters)


def _grams(tokens: Sequence[str], order: int) -> Grams:
    return Counter(tuple(tokens[i : i + order]) for i in range(len(tokens) - order + 1))


def bleu(*, order: int = 4, ignore_case: bool = False) -> AnswerMetric:
    """Return BLEU of all answers together, from 0 to 1, without smoothing.

    Tokens are words, single characters of Chinese and Japanese, and punctuation marks. If there are several expected
    texts, the one with the closest length determines the brevity penalty.
    """

    def mark(answer: str, question: BenchmarkQuestion) -> Mark:
        words = _TOKEN.findall(answer.lower() if ignore_case else answer)
        wanted = [_TOKEN.findall(text.lower() if ignore_case else text) for text in question.expected]
        closest = min(map(len, wanted), key=lambda length: (abs(length - len(words)), length))
        values = {"length": float(len(words)), "expected length": float(closest)}
        for size in range(1, order + 1):
            grams, most = _grams(words, size), Counter[tuple[str, ...]]()
            for each in wanted:
                most |= _grams(each, size)
            values |= {f"matches {size}": float((grams & most).total()), f"grams {size}": float(grams.total())}
        return Mark(answer.strip() or None, values)

    def summary(means: Mapping[str, float]) -> dict[str, float]:
        shares = [(means.get(f"matches {n}", 0.0), means.get(f"grams {n}", 0.0)) for n in range(1, order + 1)]
        length, wanted = means.get("length", 0.0), means.get("expected length", 0.0)
        if not length or not all(matches for matches, _ in shares):
            return {"bleu": 0.0}
        precision = math.exp(sum(math.log(matches / grams) for matches, grams in shares) / order)
        return {"bleu": precision * min(1.0, math.exp(1 - wanted / length))}

    return AnswerMetric("bleu", mark, summary)


class _Cider:
    """Weight the n-grams of texts for CIDEr-D: an n-gram counts more if the expected texts of few questions contain
    it.
    """

    def __init__(self, references: Iterable[Sequence[str]]) -> None:
        self.documents: list[Grams] = [Counter() for _ in range(4)]
        self.count = 0
        for texts in references:
            self.count += 1
            words = [spoken(text).split() for text in texts]
            for order, documents in enumerate(self.documents, 1):
                documents.update({gram for each in words for gram in _grams(each, order)})

    def vector(self, words: Sequence[str], order: int) -> dict[tuple[str, ...], float]:
        documents = self.documents[order - 1]
        rare = {gram: math.log(max(1, self.count)) - math.log(max(1, documents[gram])) for gram in _grams(words, order)}
        return {gram: count * rare[gram] for gram, count in _grams(words, order).items()}

    def score(self, answer: str, expected: Sequence[str]) -> float:
        words, total = spoken(answer).split(), 0.0
        for text in expected:
            wanted = spoken(text).split()
            penalty = math.exp(-((len(words) - len(wanted)) ** 2) / (2 * _SIGMA**2))
            for order in range(1, 5):
                ours, theirs = self.vector(words, order), self.vector(wanted, order)
                shared = ours.keys() & theirs.keys()
                product = sum(min(ours[gram], theirs[gram]) * theirs[gram] for gram in shared)
                norms = math.hypot(*ours.values()) * math.hypot(*theirs.values())
                total += penalty * product / norms if norms else 0.0
        return 10 * total / 4 / len(expected)


def cider(references: References) -> AnswerMetric:
    """Return CIDEr-D: the mean cosine of weighted n-grams of answer and expected texts, times 10.

    `references`: the expected texts of all questions. They are read when the first answer is scored.
    """
    weights: list[_Cider] = []

    def mark(answer: str, question: BenchmarkQuestion) -> Mark:
        if not weights:
            weights.append(_Cider(references()))
        return Mark(answer.strip() or None, {"cider": weights[0].score(answer, question.expected)})

    return AnswerMetric("cider", mark)
