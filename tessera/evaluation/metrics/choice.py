"""Find the letter of the option that an answer names, by the rules of published evaluations.

Each rule takes an answer, the options by letter, and the id of the question, and returns a letter or None.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Literal

from tessera.evaluation.benchmark import AnswerMetric, BenchmarkQuestion, Mark
from tessera.evaluation.metrics.texts import without_case

Rule = Literal["mmmu", "mcq", "mmbench", "light", "scienceqa", "vlmevalkit", "first"]
Find = Callable[[str, Mapping[str, str], str], "str | None"]

_SUBJECTS = ("answer", "correct answer", "best answer", "correct option", "best option", "choice", "correct choice")
_PHRASES = (
    *(f"{article}{subject} is" for subject in _SUBJECTS for article in ("the ", "")),
    *("i choose", "i select", "i pick", "my answer is", "my choice is"),
    *("옵션", "정답은", "답은", "답:", "答案是", "答案为", "选", "答えは"),
)
_REFUSALS = (
    "Sorry, I can't help with images of people yet.",
    "I can't process this file.",
    "I'm sorry, but without the image provided",
    "Cannot determine the answer",
)
_FORMS = ("{}.", "{},", "{}:", "{})", "{}).", "({})", "({}).", ":{}", ":{},", ":{}.", ":{})", ":{}).")


def _stripped(text: str, marks: str) -> str:
    """Strip the characters `marks` from both ends, one after another in their order, and add a blank at both ends."""
    for mark in marks:
        text = text.strip(mark)
    return f" {text} "


def chance_letter(letters: str, id: str) -> str:
    """Return a pseudorandom letter that depends only on the question's id, so that runs give the same score."""
    return letters[int.from_bytes(hashlib.sha256(id.encode()).digest()[:8]) % len(letters)]


def by_mmmu(answer: str, options: Mapping[str, str], id: str) -> str:
    """Apply MMMU's rule: (X), then X and a blank, then X., then the text of an option; at last a random letter.

    The text of an option counts only in an answer of more than five words.
    """
    text = _stripped(answer, ",.!?;:'")
    for form, position in (("({})", "({})"), ("{} ", " {} "), ("{}.", " {} ")):
        letters = [letter for letter in options if form.format(letter) in text]
        if letters:
            return max(letters, key=lambda letter: text.rfind(position.format(letter)))
    lower = text.lower()
    letters = [letter for letter in options if options[letter].lower() in lower] if len(text.split()) > 5 else []
    if letters:
        return max(letters, key=lambda letter: lower.rfind(options[letter].lower()))
    return chance_letter("".join(options), id)


def by_mcq(answer: str, options: Mapping[str, str], id: str = "") -> str | None:
    """Return the letter in the clearest form: first, last, after "the answer is", (X), X., X:, X), "X ", anywhere."""
    if not answer.strip():
        return None
    text = _stripped(answer.strip(), ",.!?;:'\"")
    inner = text.strip()
    # (rank of the form, position, letter): the answer is the letter of the highest rank, and of these the last one
    ranked: list[tuple[int, int, str]] = []
    for rank, form in ((6, "({})"), (5, "{}."), (4, "{}:"), (3, "{})"), (2, "{} ")):
        ranked += [(rank, text.rfind(form.format(each)), each) for each in options if form.format(each) in text]
    for phrase in _PHRASES:
        after = text.lower().find(phrase)
        if after >= 0:
            positions = ((text.find(letter, after + len(phrase)), letter) for letter in options)
            ranked += [(7, position, letter) for position, letter in positions if position >= 0]
    for letter in options:
        if inner.startswith(letter) and not inner[1:2].isalpha():
            ranked.append((10, 0, letter))
        if inner.endswith(letter) and not inner[-2:-1].isalpha():
            ranked.append((9, len(text) - 1, letter))
    ranked = ranked or [(0, text.rfind(letter), letter) for letter in options if letter in text]
    return max(ranked, key=lambda each: each[:2])[2] if ranked else None


def by_mmbench(answer: str, options: Mapping[str, str], id: str = "") -> str | None:
    """Return the only letter that is a word, with punctuation or without, or whose option the answer contains.

    Then `by_mcq` decides, where the published evaluation asks a language model.
    """
    words, letters = answer.split(), "ABCDE"
    single = [letter for letter in letters if letter in words]
    if len(single) == 1 and not (single == ["A"] and len(words) > 3):  # "A" may be an article
        return single[0]
    for form in _FORMS:
        formed = [letter for letter in letters if form.format(letter) in words]
        if len(formed) == 1:
            return formed[0]
    named = [letter for letter in options if letter in "ABCD" and options[letter].lower() in answer.lower()]
    return named[0] if len(named) == 1 else by_mcq(answer, dict.fromkeys("ABCD", ""))


def by_light(answer: str, options: Mapping[str, str], id: str = "") -> str | None:
    """Return the letter of "X." at the start, or an answer that is a letter (AI2D of lmms-eval)."""
    match = re.match(r"\s*([A-Z])\.", answer)
    letter = without_case(match[1] if match else answer, punctuation=False).upper()
    return letter if letter in options else None


def by_scienceqa(answer: str, options: Mapping[str, str], id: str = "") -> str | None:
    """Return an answer that is a letter, or the letter of "X." at the start (ScienceQA of lmms-eval)."""
    text = answer.strip()
    letter = text[0] if text[:1].isupper() and text[1:2] == "." else text.upper()
    return letter if letter in options else None


def by_vlmevalkit(answer: str, options: Mapping[str, str], id: str = "") -> str | None:
    """Return the only letter that is a word, among the last four words, or the only option in a short answer."""
    if any(refusal in answer for refusal in _REFUSALS):
        return None
    words = re.sub(r"[.()\[\],:;!*#{}]", " ", answer).split()
    letters = [letter for letter in options if letter in words]
    if len(letters) == 1 and words.index(letters[0]) > len(words) - 5:
        return letters[0]
    if not letters and "Z" in words:
        return None
    lower = answer.lower()
    if len(lower) > 2 * sum(map(len, options.values())):
        return None
    named = [letter for letter, text in options.items() if text.lower() in lower]
    return named[0] if len(named) == 1 else None


def by_first(answer: str, options: Mapping[str, str], id: str = "") -> str | None:
    """Return the first letter A to D after common introductions (Video-MME of VLMEvalKit)."""
    text = answer.strip()
    for said in _INTRODUCTIONS:
        text = text.replace(said, "")
    if len(text.split()) > 10 and not re.search("[ABCD]", text):
        return None
    match = re.search("[ABCD]", text)
    return match[0] if match else None


_INTRODUCTIONS = (
    *("The best answer is", "The correct answer is", "The answer is", "The answer"),
    # the missing commas are in the published code
    *("The best option isThe correct option is", "Best answer:Best option:", "Answer:", "Option:"),
)
_RULES: dict[Rule, Find] = {
    "mmmu": by_mmmu,
    "mcq": by_mcq,
    "mmbench": by_mmbench,
    "light": by_light,
    "scienceqa": by_scienceqa,
    "vlmevalkit": by_vlmevalkit,
    "first": by_first,
}


def choice(*, rule: Rule = "vlmevalkit", letters: str = "", mean_of: str = "") -> AnswerMetric:
    """Score 1 for the letter of the right option.

    `letters`: letters of the options, if the text of the question contains the options. `mean_of`: name of a category:
    the score is the mean of the scores of its values. An expected answer that is not a letter is compared as text,
    without case and final full stops.
    """
    find = _RULES[rule]

    def mark(answer: str, question: BenchmarkQuestion) -> Mark:
        options = question.options or dict.fromkeys(letters, "")
        if options and question.expected[0] in options:
            letter = find(answer.strip(), options, question.id)
            right = float(letter == question.expected[0])
        else:
            letter = without_case(answer).rstrip(".") or None
            right = float(letter in {without_case(text) for text in question.expected})
        values = {"accuracy": right}
        if mean_of:
            value = question.categories.get(mean_of, "")
            values |= {f"right in {value}": right, f"asked in {value}": 1.0}
        return Mark(letter, values)

    def summary(means: Mapping[str, float]) -> dict[str, float]:
        counts = {name.removeprefix("asked in "): mean for name, mean in means.items() if name.startswith("asked in ")}
        shares = [means.get(f"right in {value}", 0.0) / mean for value, mean in counts.items() if mean]
        overall = means.get("accuracy", 0.0)
        if not mean_of:
            return {"accuracy": overall}
        return {f"mean of {mean_of}": sum(shares) / len(shares) if shares else 0.0, "accuracy": overall}

    return AnswerMetric("choice", mark, summary)
