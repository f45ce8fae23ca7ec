"""Write the report of an evaluation: scores with intervals, tables by category, protocols, and answers with images.

The page is made from the files of an evaluation alone, which may be from somebody else: all texts are escaped, and only
images and recordings in its folder are embedded.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tessera.errors import TesseraError, first_line
from tessera.evaluation.answers import Row, read_answers
from tessera.evaluation.benchmark import Benchmark
from tessera.evaluation.comparison import Result, TaskComparison, answers_of, metric_of_result, pairs_of
from tessera.evaluation.protocol import flat
from tessera.evaluation.run import read_results
from tessera.evaluation.scores import TaskResult
from tessera.evaluation.thumbnails import MOST_CARDS, MOST_IMAGES, chosen_rows, read_thumbnails, write_thumbnails
from tessera.observe.report.answers import STYLE, embedded_media, folded, regions_overlay, text_block
from tessera.observe.report.page import write_page
from tessera.runtime import html

log = logging.getLogger("tessera")

REPORT = "report.html"
_MOST_CATEGORIES = 60  # limit of rows of a table
_FIGURES = ("value", "low", "high")
_STYLE = (
    STYLE
    + """
.pick{position:absolute;opacity:0}.pick+label{display:inline-block;margin:0 8px 12px 0;padding:3px 12px;cursor:pointer;
border:1px solid var(--line);border-radius:14px;color:var(--soft)}.pick:checked+label{border-color:var(--main);
color:var(--main)}.pick:focus-visible+label{outline:2px solid var(--main)}
.pick.wrong:checked~.answers>.right,.pick.right:checked~.answers>.wrong{display:none}
.pick.better:checked~.answers>:not(.better),.pick.worse:checked~.answers>:not(.worse){display:none}
.answer.worse{border-color:var(--bad)}.answer.better{border-color:var(--good)}
.answers.cards{grid-template-columns:repeat(auto-fill,minmax(min(100%,300px),1fr))}.two{display:grid;gap:10px;
grid-template-columns:1fr 1fr}.two>div{min-width:0}.spread{width:180px;height:14px}
.spread .line{stroke:var(--main);stroke-width:3}.spread .back{stroke:var(--line)}.spread circle{fill:var(--main)}
.mark{float:right;font-weight:600;font-variant-numeric:tabular-nums}.differs{color:var(--bad)}
"""
)


def write_evaluation_page(out: Path) -> Path:
    """Write `report.html` of an evaluation into its folder."""
    results = read_results(out)
    names = dict.fromkeys(str(_at(result, "protocol", "model", "name")) for result in results.values())
    parts = [f'<h1>Evaluation</h1><div class="soft">{html.escape(", ".join(names))}</div>']
    parts += [_overview(results)] if len(results) > 1 else []
    parts += [_task(out, number, title, result) for number, (title, result) in enumerate(results.items())]
    path = out / REPORT
    write_page(path, html.page(f"Evaluation · {', '.join(names)} · Tessera", parts, _STYLE))
    return path


def report_results(out: Path, benchmarks: Sequence[Benchmark], results: Sequence[TaskResult]) -> None:
    """Write the page of an evaluation. A failure does not discard the results."""
    try:
        for benchmark, result in zip(benchmarks, results, strict=True):
            write_thumbnails(out, benchmark, read_answers(result.answers), benchmark.metric)
        write_evaluation_page(out)
    except (OSError, TesseraError) as error:
        log.warning("%s was not written: %s", out / REPORT, first_line(error))


def write_comparison_page(path: Path, comparisons: Sequence[TaskComparison]) -> Path:
    """Write a page with the answers of two models side by side."""
    names = [str(_at(result, "protocol", "model", "name")) for result in comparisons[0].results]
    parts = [f'<h1>Comparison</h1><div class="soft">{html.escape(names[0])} and {html.escape(names[1])}</div>']
    for number, each in enumerate(comparisons):
        lines = "".join(f"<p>{html.escape(line)}</p>" for line in each.lines())
        parts.append(html.section(each.title, lines + ("" if each.test is None else _pairs(number, each, names))))
    write_page(path, html.page(f"{names[0]} and {names[1]} · Tessera", parts, _STYLE))
    return path


def _overview(results: Mapping[str, Result]) -> str:
    rows = []
    for title, result in results.items():
        score = _figure(_at(result, "figures", str(result.get("metric"))))
        rows.append([html.escape(title), html.escape(str(result.get("metric"))), *_cells(score), _spread(score)])
    return html.section("Scores", html.table(["benchmark", "metric", "score", "95 % interval", ""], rows))


def _task(out: Path, number: int, title: str, result: Result) -> str:
    metric = str(result.get("metric"))
    score = _figure(_at(result, "figures", metric))
    pairs = [
        (metric, f"{score[0]:.4f}"),
        ("95 % interval", f"{score[1]:.3f} to {score[2]:.3f}"),
        ("questions", f"{result.get('units')}"),
        ("protocol", str(result.get("fingerprint"))),
    ]
    for name, label in (("unusable", "could not be asked"), ("unanswered", "without an answer")):
        pairs += [(label, str(result.get(name)))] if result.get(name) else []
    pairs += [("the first of them", str(result["first_refusal"]))] if result.get("first_refusal") else []
    cost = result.get("cost")
    if isinstance(cost, dict):
        pairs += [("tokens read", _count(cost.get("prompt_tokens"))), ("generated", _count(cost.get("new_tokens")))]
        pairs += [("seconds", _count(cost.get("seconds")))]
    figures = _mapping(result.get("figures"))
    others = [
        [html.escape(str(name)), *_cells(_figure(each)), _spread(_figure(each))]
        for name, each in figures.items()
        if name != metric
    ]
    body = [html.facts(pairs), html.table(["figure", "value", "95 % interval", ""], others) if others else ""]
    body += [
        _category_table(str(name), _mapping(each), metric)
        for name, each in list(_mapping(result.get("categories")).items())[:20]
    ]
    body += [_answers(out, number, title, result), _protocol(result)]
    return html.section(title, "".join(body))


def _category_table(name: str, categories: Mapping[str, Any], metric: str) -> str:
    if len(categories) < 2:
        return ""
    rows = []
    for value, each in list(categories.items())[:_MOST_CATEGORIES]:
        figure = _figure(_at(_mapping(each), "figures", metric))
        rows.append([html.escape(value), _count(_mapping(each).get("questions")), *_cells(figure), _spread(figure)])
    return "<p></p>" + html.table([name, "questions", metric, "95 % interval", ""], rows)


def _protocol(result: Result) -> str:
    rows = [
        [html.escape(key), html.escape(str(value)[:2000])]
        for part in ("protocol", "environment")
        for key, value in flat(_mapping(result.get(part)))
    ]
    table = html.table(["what the score depends on", ""], rows, text=True)
    return f"<details><summary>Protocol {html.escape(str(result.get('fingerprint')))}</summary>{table}</details>"


def _answers(out: Path, number: int, title: str, result: Result) -> str:
    """Return the cards of answers, with buttons that select right or wrong answers.

    The buttons work without scripts.
    """
    metric = metric_of_result(result)
    rows = [row for row in read_answers(answers_of(out, result)) if "unusable" not in row]
    higher = bool(result.get("higher_is_better", True))
    rows_shown = chosen_rows(rows, [metric.score(row["values"]) for row in rows], higher)
    images = read_thumbnails(out, title)
    cards = []
    for row in rows_shown:
        score = metric.score(row["values"])
        kind = "right" if _is_right(score, higher) else "wrong"
        cards.append(
            f'<div class="answer {kind}"><span class="mark">{score:.3g}</span>'
            f"{_images(out, row, images)}{_question(row)}{_answer(row)}{_expected(row)}</div>"
        )
    note = f'<p class="soft">{_how_many(len(rows_shown), len(rows))}. Worst first.</p>'
    buttons = _buttons(number, [("all", "all"), ("wrong", "wrong"), ("right", "right")])
    return f'<h3>Answers</h3>{note}<div>{buttons}<div class="answers cards">{"".join(cards)}</div></div>'


def _pairs(number: int, each: TaskComparison, names: Sequence[str]) -> str:
    """Return the cards of questions that two models answered, first those with different marks."""
    rows = [read_answers(answers_of(folder, result)) for folder, result in zip(each.folders, each.results, strict=True)]
    metric = metric_of_result(each.results[0])
    sign = 1.0 if each.results[0].get("higher_is_better", True) else -1.0
    pairs = [
        (sign * (metric.score(b["values"]) - metric.score(a["values"])), a, b) for a, b in pairs_of(rows[0], rows[1])
    ]
    pairs.sort(key=lambda pair: (pair[0] == 0, pair[0]))
    images = read_thumbnails(each.folders[0], each.title)
    cards = []
    for change, first, second in pairs[:MOST_CARDS]:
        kind = "better" if change > 0 else "worse" if change < 0 else "same"
        sides = "".join(
            f'<div><div class="soft">{html.escape(name)}'
            f'<span class="mark">{metric.score(row["values"]):.3g}</span></div>{_answer(row)}</div>'
            for name, row in zip(names, (first, second), strict=True)
        )
        cards.append(
            f'<div class="answer {kind}">{_images(each.folders[0], first, images)}{_question(first)}'
            f'<div class="two">{sides}</div>{_expected(first)}</div>'
        )
    note = f'<p class="soft">{_how_many(min(len(pairs), MOST_CARDS), len(pairs))}. Changed marks first.</p>'
    buttons = _buttons(number, [("all", "all"), ("worse", "worse"), ("better", "better")])
    return f'{note}<div>{buttons}<div class="answers cards">{"".join(cards)}</div></div>'


def _buttons(number: int, choices: Iterable[tuple[str, str]]) -> str:
    return "".join(
        f'<input class="pick {kind}" type="radio" name="pick-{number}" id="pick-{number}-{kind}"'
        f'{" checked" if kind == "all" else ""}><label for="pick-{number}-{kind}">{label}</label>'
        for kind, label in choices
    )


def _how_many(count: int, total: int) -> str:
    rest = f" of {total:,}; the file of answers has all" if count < total else ""
    return f"{count:,} answers{rest}, about {MOST_IMAGES} images at most"


def _question(row: Row) -> str:
    return f'<div class="soft">{folded(str(row.get("prompt") or ""))}</div>'


def _answer(row: Row) -> str:
    """Return the answer, and the part of it that is scored if that is not the full answer."""
    answer, extracted = str(row.get("answer") or ""), row.get("extracted")
    short = "" if extracted is None or str(extracted) == answer.strip() else str(extracted)
    scored = f'<div class="soft">read as {html.escape(short[:200])}</div>' if short else ""
    nothing = '<div class="soft">nothing to score</div>' if extracted is None and answer.strip() else ""
    error = _mapping(row.get("error")).get("message")
    problem = f'<div class="soft differs">{html.escape(str(error)[:400])}</div>' if error else ""
    return f"{text_block(answer, 'said')}{scored}{nothing}{problem}"


def _expected(row: Row) -> str:
    expected = row.get("expected")
    texts = list(dict.fromkeys(map(str, expected)))[:10] if isinstance(expected, list) else []
    return f'<div class="soft">expected</div>{text_block(" | ".join(texts), "")}' if texts else ""


def _images(out: Path, row: Row, images: Mapping[str, Sequence[tuple[str, tuple[int, int]]]]) -> str:
    regions = [region for region in _list(row.get("regions")) if isinstance(region, dict)]
    parts = [
        embedded_media(out, file, regions_overlay(regions, number, size))
        for number, (file, size) in enumerate(images.get(str(row["index"]), ()))
    ]
    return f'<div class="images">{"".join(parts)}</div>' if any(parts) else ""


def _is_right(score: float, higher_is_better: bool) -> bool:
    return score >= 0.5 if higher_is_better else score <= 0.5


def _figure(value: Any) -> tuple[float, float, float]:
    numbers = [_mapping(value).get(name) for name in _FIGURES]
    low, middle, high = (float(each) if isinstance(each, (int, float)) else math.nan for each in numbers)
    return low, middle, high


def _cells(figure: tuple[float, float, float]) -> list[str]:
    return [f"{figure[0]:.4f}", f"{figure[1]:.4f} to {figure[2]:.4f}"]


def _spread(figure: tuple[float, float, float]) -> str:
    """Return an SVG of an interval on a line from 0 to 1; "" if a bound is not on this line."""
    if not all(0 <= each <= 1 for each in figure):
        return ""
    value, low, high = (4 + 172 * each for each in figure)
    return (
        '<svg class="spread" viewBox="0 0 180 14"><line class="back" x1="4" x2="176" y1="7" y2="7"/>'
        f'<line class="line" x1="{low:.1f}" x2="{high:.1f}" y1="7" y2="7"/>'
        f'<circle cx="{value:.1f}" cy="7" r="4"/></svg>'
    )


def _count(value: object) -> str:
    return f"{value:,.0f}" if isinstance(value, (int, float)) else "-"


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _at(value: Any, *keys: str) -> Any:
    """Return a value in nested mappings; None if a key is missing."""
    for key in keys:
        value = _mapping(value).get(key)
    return value
