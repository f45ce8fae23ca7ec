"""Check instructions that a program can verify (IFEval).

Three of its 25 kinds of instructions need packages that are not used here: `length_constraints:number_sentences` (a
trained sentence splitter), `change_case:capital_word_frequency` (a trained tokenizer) and
`language:response_language`. They are left out of the score, and the figure `unverified` is their share. The two
instructions on English in capitals or small letters are checked without recognizing the language.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tessera.data.sources.container import RecordError
from tessera.evaluation.benchmark import AnswerMetric, BenchmarkQuestion, Mark

Check = Callable[[str, Mapping[str, Any]], bool]
_MAX_PATTERN = 200  # longer keywords are searched as plain text: the data may contain hostile patterns


def _compare(count: int, wanted: Any, relation: Any) -> bool:
    return count < int(wanted) if relation == "less than" else count >= int(wanted)


def _search(keyword: str, answer: str) -> list[str]:
    """Return the matches of a keyword, which is a regular expression in the published checks.

    A keyword that could take long, with repetitions or groups, is searched as plain text.
    """
    slow = len(keyword) > _MAX_PATTERN or re.search(r"[*+{(|\\]", keyword) is not None
    return re.findall(re.escape(keyword) if slow else keyword, answer, re.IGNORECASE)


def _paragraphs(answer: str, fields: Mapping[str, Any]) -> bool:
    """Return whether `***` divides the answer into `num_paragraphs`. Only the first and the last may be empty."""
    pieces = [bool(piece.strip()) for piece in re.split(r"\s?\*\*\*\s?", answer)]
    return all(pieces[1:-1]) and sum(pieces) == int(fields["num_paragraphs"])


def _nth_paragraph(answer: str, fields: Mapping[str, Any]) -> bool:
    pieces = answer.split("\n\n")
    count, number = sum(bool(piece.strip()) for piece in pieces), int(fields["nth_paragraph"])
    if not 1 <= number <= count or not pieces[number - 1].strip():
        return False
    word = pieces[number - 1].strip().split()[0].lstrip("'").lstrip('"')
    first = re.split(r"[.,?!'\"]", word)[0].lower()
    return count == int(fields["num_paragraphs"]) and first == str(fields["first_word"]).lower()


def _postscript(answer: str, fields: Mapping[str, Any]) -> bool:
    marker = str(fields["postscript_marker"])
    patterns = {"P.P.S": r"\s*p\.\s?p\.\s?s.*$", "P.S.": r"\s*p\.\s?s\..*$"}
    pattern = patterns.get(marker, r"\s*" + re.escape(marker.lower()) + r".*$")
    return re.search(pattern, answer.lower(), re.MULTILINE) is not None


def _highlights(answer: str, fields: Mapping[str, Any]) -> bool:
    single = [text for text in re.findall(r"\*[^\n\*]*\*", answer) if text.strip("*").strip()]
    double = [
        text for text in re.findall(r"\*\*[^\n\*]*\*\*", answer) if text.removeprefix("**").removesuffix("**").strip()
    ]
    return len(single) + len(double) >= int(fields["num_highlights"])


def _sections(answer: str, fields: Mapping[str, Any]) -> bool:
    pieces = re.split(r"\s?" + re.escape(str(fields["section_spliter"])) + r"\s?\d+\s?", answer)
    return len(pieces) - 1 >= int(fields["num_sections"])


def _json(answer: str, fields: Mapping[str, Any]) -> bool:
    text = answer.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def _two_responses(answer: str, fields: Mapping[str, Any]) -> bool:
    pieces = answer.split("******")
    if any(not piece.strip() for piece in pieces[1:-1]):
        return False
    texts = [piece.strip() for piece in pieces if piece.strip()]
    return len(texts) == 2 and texts[0] != texts[1]


def _bullets(answer: str, fields: Mapping[str, Any]) -> bool:
    stars = re.findall(r"^\s*\*[^\*].*$", answer, re.MULTILINE)
    return len(stars) + len(re.findall(r"^\s*-.*$", answer, re.MULTILINE)) == int(fields["num_bullets"])


_CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_CHECKS: Mapping[str, Check] = {
    "keywords:existence": lambda answer, of: all(_search(str(word), answer) for word in of["keywords"]),
    "keywords:frequency": lambda answer, of: _compare(
        len(_search(str(of["keyword"]), answer)), of["frequency"], of["relation"]
    ),
    "keywords:forbidden_words": lambda answer, of: (
        not any(re.search(rf"\b{re.escape(str(word))}\b", answer, re.IGNORECASE) for word in of["forbidden_words"])
    ),
    "keywords:letter_frequency": lambda answer, of: _compare(
        answer.lower().count(str(of["letter"]).lower()), of["let_frequency"], of["let_relation"]
    ),
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:number_words": lambda answer, of: _compare(
        len(re.findall(r"\w+", answer)), of["num_words"], of["relation"]
    ),
    "length_constraints:nth_paragraph_first_word": _nth_paragraph,
    "detectable_content:number_placeholders": lambda answer, of: (
        len(re.findall(r"\[.*?\]", answer)) >= int(of["num_placeholders"])
    ),
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:constrained_response": lambda answer, of: any(text in answer for text in _CONSTRAINED),
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _json,
    "detectable_format:title": lambda answer, of: any(
        text.lstrip("<").rstrip(">").strip() for text in re.findall(r"<<[^\n]+>>", answer)
    ),
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": lambda answer, of: (
        answer.strip().lower().startswith(str(of["prompt_to_repeat"]).strip().lower())
    ),
    "startend:end_checker": lambda answer, of: (
        answer.strip().strip('"').lower().endswith(str(of["end_phrase"]).strip().lower())
    ),
    "startend:quotation": lambda answer, of: len(answer.strip()) > 1 and answer.strip()[0] == answer.strip()[-1] == '"',
    "change_case:english_capital": lambda answer, of: answer.isupper(),
    "change_case:english_lowercase": lambda answer, of: answer.islower(),
    "punctuation:no_comma": lambda answer, of: "," not in answer,
}
UNVERIFIED = (
    "language:response_language",
    "length_constraints:number_sentences",
    "change_case:capital_word_frequency",
)


def forms(answer: str) -> list[str]:
    """Return an answer and its variants for the loose score: without first or last line, and without stars."""
    lines = answer.split("\n")
    cut = [answer, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return [*cut, *(text.replace("*", "") for text in cut)]


def follows(answer: str, instruction: str, fields: Mapping[str, Any]) -> bool:
    """Return whether an answer follows an instruction. An empty answer follows none."""
    return bool(answer.strip()) and _CHECKS[instruction](answer, fields)


def ifeval() -> AnswerMetric:
    """Score instructions: the share of prompts whose instructions are all followed (strict), and further figures.

    The fields `instruction_id_list` and `kwargs` are those of the published data.
    """

    def mark(answer: str, question: BenchmarkQuestion) -> Mark:
        names, fields = question.fields.get("instruction_id_list"), question.fields.get("kwargs")
        strict, loose, unverified = [], [], 0
        try:
            for name, arguments in zip(_listed(names), _listed(fields), strict=True):
                if name in UNVERIFIED:
                    unverified += 1
                    continue
                options = {key: value for key, value in (arguments or {}).items() if value}
                strict.append(follows(answer, name, options))
                loose.append(any(follows(form, name, options) for form in forms(answer)))
        except (KeyError, TypeError, ValueError, AttributeError, re.error) as error:
            what = f"the instructions of the row cannot be read: {type(error).__name__}: {error}"
            raise RecordError(what, where=question.id, code="evaluation.bad-instruction") from None
        values = {
            "prompts strict": float(bool(strict) and all(strict)),
            "prompts loose": float(bool(loose) and all(loose)),
            "prompts": float(bool(strict)),
            "strict": float(sum(strict)),
            "loose": float(sum(loose)),
            "verified": float(len(strict)),
            "unverified": float(unverified),
        }
        return Mark(answer.strip() or None, values)

    def summary(means: Mapping[str, float]) -> dict[str, float]:
        def share(part: str, whole: float) -> float:
            return means.get(part, 0.0) / whole if whole else 0.0

        prompts, verified = means.get("prompts", 0.0), means.get("verified", 0.0)
        return {
            "prompt_level_strict": share("prompts strict", prompts),
            "prompt_level_loose": share("prompts loose", prompts),
            "inst_level_strict": share("strict", verified),
            "inst_level_loose": share("loose", verified),
            "unverified": share("unverified", verified + means.get("unverified", 0.0)),
        }

    return AnswerMetric("ifeval", mark, summary)


def _listed(value: Any) -> Sequence[Any]:
    listed: Sequence[Any] = json.loads(value) if isinstance(value, str) else value
    return listed
