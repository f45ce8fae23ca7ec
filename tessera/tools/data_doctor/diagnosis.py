"""Hold the result of an examination, and write it as lines for a terminal, as one HTML page, and as JSON.

Text from data is made harmless for the terminal, and escaped in the page.
"""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tessera.runtime import html
from tessera.runtime.html import escape, section
from tessera.tools.data_doctor.collect import Rung, SetFacts
from tessera.tools.data_doctor.findings import KINDS, SEVERITIES, Finding, Kind, Severity
from tessera.tools.data_doctor.histogram import Histogram, bars, chart, short
from tessera.tools.data_doctor.show import Shown, Thumb

WITHOUT_A_MODEL = (
    "Lengths are in characters: with --recipe or --model the doctor also counts tokens, says what is trained on, "
    "forecasts what a row length drops, and weighs each sample."
)
_WIDE = 110
_COLOURS = {"loss": "31", "warning": "33", "note": "36", "good": "32", "bold": "1", "soft": "2", "trained": "30;42"}
_MARKS: dict[Severity, str] = {"loss": "✗", "warning": "!", "note": "·"}
_MAX_SHOWN = 700  # characters of a sample


@dataclass(frozen=True)
class Diagnosis:
    sets: tuple[SetFacts, ...]
    findings: dict[str, Finding]  # by kind, worst first
    histograms: tuple[Histogram, ...]
    forecast: tuple[Rung, ...]
    samples: tuple[Shown, ...]
    length: int | None  # None: without a processor
    decoded: bool
    seconds: float

    @property
    def worst(self) -> Literal["sound", "note", "warning", "loss"]:
        for severity in SEVERITIES:
            if any(KINDS[name].severity == severity for name in self.findings):
                return severity
        return "sound"

    @property
    def exit_code(self) -> int:
        """Return 1 when a run would leave samples out."""
        return 1 if self.worst == "loss" else 0

    @property
    def verdict(self) -> str:
        rows, usable = self.total("rows"), self.total("usable")
        if self.worst == "loss":
            return f"{rows - usable:,} of {rows:,} samples will not be trained on"
        if self.worst == "warning":
            return f"All {rows:,} samples can be used, some look wrong"
        return f"All {rows:,} samples are sound"

    def total(self, name: str) -> int:
        return sum(getattr(one, name) for one in self.sets)

    def facts(self) -> list[tuple[str, str]]:
        """Return the first things to know, named."""
        rows = self.total("rows")
        facts = [("samples", f"{rows:,}"), ("usable", f"{self.total('usable') / max(1, rows):.2%}")]
        if self.length is None:
            facts.append(("characters", f"{self.total('characters'):,}"))
        else:
            tokens = max(1, self.total("tokens"))
            facts += [
                ("tokens", f"{self.total('tokens'):,}"),
                ("trained on", f"{self.total('trained') / tokens:.1%}"),
                ("tokens of media", f"{self.total('media_tokens') / tokens:.1%}"),
            ]
            padding = next((rung.padding for rung in self.forecast if rung.chosen), None)
            if padding is not None:
                facts.append((f"padding at {self.length:,}", f"{padding:.1%}"))
        facts += [(kind, f"{self.total(kind):,}") for kind in ("images", "videos", "audios") if self.total(kind)]
        return facts

    def notes(self) -> list[str]:
        """Return what a reader should know of how this was found out."""
        said = [] if self.length is not None else [WITHOUT_A_MODEL]
        if self.decoded:
            said.append("Every image and video was decoded.")
        elif self.total("media"):
            said.append("Media was judged by headers; --decode reads all of it.")
        return said

    # ------------------------------------------------------------------------------------------ forms

    def lines(self, *, colour: bool = False, samples: int = 3) -> list[str]:
        return _terminal_lines(self, colour=colour, samples=samples)

    def html(self) -> str:
        return _page(self)

    def json(self) -> str:
        facts: dict[str, Any] = {
            "worst": self.worst,
            "verdict": self.verdict,
            "rows": self.total("rows"),
            "usable": self.total("usable"),
            "length": self.length,
            "decoded": self.decoded,
            "seconds": round(self.seconds, 2),
            "sets": [asdict(one) for one in self.sets],
            "findings": [
                {"kind": name, **asdict(KINDS[name]), **asdict(finding)} for name, finding in self.findings.items()
            ],
            "histograms": [asdict(one) for one in self.histograms],
            "forecast": [asdict(rung) for rung in self.forecast],
        }
        return json.dumps(facts, indent=2, ensure_ascii=True)


# ---------------------------------------------------------------------------------------------- terminal


def _terminal_lines(diagnosis: Diagnosis, *, colour: bool, samples: int) -> list[str]:
    """Return a diagnosis as lines. Text from data is made harmless: it may hold codes that move the cursor."""
    paint = _Paint(colour)
    worst = diagnosis.worst
    head = "good" if worst in ("sound", "note") else worst
    lines = [paint(diagnosis.verdict, head, "bold"), ""]
    lines += ["   ".join(f"{name} {paint(value, 'bold')}" for name, value in diagnosis.facts()), ""]
    if len(diagnosis.sets) > 1:
        lines += [
            f"  {histogram.usable:>12,} of {histogram.rows:>12,} usable   {harmless(histogram.path)}"
            for histogram in diagnosis.sets
        ]
        lines.append("")
    for name, finding in diagnosis.findings.items():
        kind = KINDS[name]
        lines.append(f"{paint(_MARKS[kind.severity], kind.severity)} {paint(kind.title, 'bold')}: {finding.count:,}")
        for location in finding.locations:
            id = f" ({harmless(location.id)})" if location.id and location.id != location.where else ""
            lines += _wrapped(f"{harmless(location.where)}{id}: {harmless(location.detail)}", "      ")
        lines += [paint(line, "soft") for line in _wrapped(f"mend: {kind.mend}", "      ")]
    if diagnosis.findings:
        lines.append("")
    for histogram in diagnosis.histograms:
        lines.append(f"{histogram.title:>24} {short(histogram.min):>7} {bars(histogram)} {short(histogram.max)}")
        lines.append(paint(f"{'':>24}         {histogram.summary()}", "soft"))
    lines += _forecast(diagnosis, paint)
    for sample in diagnosis.samples[:samples]:
        lines += ["", *_sample(sample, paint)]
    lines += ["", *(paint(line, "soft") for note in diagnosis.notes() for line in _wrapped(note, ""))]
    return lines


def _forecast(diagnosis: Diagnosis, paint: _Paint) -> list[str]:
    if not diagnosis.forecast:
        return []
    names = "   row length     dropped   tokens lost   cut by turns   tokens lost   padding       rows   heaviest"
    lines = ["", paint(names, "bold")]
    for rung in diagnosis.forecast:
        line = (
            f"{'>' if rung.chosen else ' '} {rung.length:>11,} {rung.dropped_share:>11.2%} {rung.tokens_lost:>13.2%}"
            f" {rung.cut_share:>14.2%} {rung.cut_tokens_lost:>13.2%} {rung.padding:>9.2%} {rung.rows:>10,}"
            f" {'' if rung.work is None else f'{rung.work:.2f} x':>10}"
        )
        lines.append(paint(line, "bold") if rung.chosen else line)
    if any(rung.estimated for rung in diagnosis.forecast):
        lines.append(paint("  cutting and packing are estimated from a part of the samples", "soft"))
    return lines


def _sample(sample: Shown, paint: _Paint) -> list[str]:
    counts = "" if sample.tokens is None else f"  {sample.tokens:,} tokens, {sample.trained:,} trained on"
    lines = [paint(f"── {harmless(sample.location)} ({harmless(sample.id)}){counts}", "bold")]
    if sample.problem:
        lines.append(paint(harmless(sample.problem), "loss"))
    for thumb in sample.media:
        tokens = "" if thumb.tokens is None else f", {thumb.tokens:,} tokens"
        lines.append(paint(f"   {harmless(thumb.name)}: {thumb.size}{tokens}", "note"))
    text, room = "", _MAX_SHOWN
    for span in sample.spans:
        words = harmless(span.text, keep_lines=True)
        words = words if len(words) <= room else words[: max(0, room)] + "…"
        room -= len(words)
        style = {"trained": ("trained",), "media": ("note",), "context": ()}[span.kind]
        # Without colours brackets tell what is trained on.
        plain = f"⟦{words}⟧" if span.kind == "trained" else f"[{words}]" if span.kind == "media" else words
        text += "\n".join(paint(line, *style) if line else "" for line in words.split("\n")) if paint.on else plain
        if room <= 0:
            break
    return [*lines, *text.rstrip("\n").split("\n")]


def harmless(text: str, *, keep_lines: bool = False) -> str:
    """Replace control characters by their visible symbols."""
    allowed = "\n\t" if keep_lines else ""
    return "".join(
        char
        if char.isprintable() or char in allowed
        else chr(0x2400 + ord(char))
        if ord(char) < 0x20
        else "\N{REPLACEMENT CHARACTER}"
        for char in text
    )


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, _WIDE, initial_indent=indent, subsequent_indent=indent + "  ") or [indent]


class _Paint:
    def __init__(self, on: bool) -> None:
        self.on = on

    def __call__(self, text: str, *styles: str) -> str:
        if not self.on or not styles:
            return text
        return f"\x1b[{';'.join(_COLOURS[style] for style in styles)}m{text}\x1b[0m"


# ---------------------------------------------------------------------------------------------- page

_STYLE = """
:root{--loss:#c23b3b;--warning:#b07000;--note:#4a6a8a;--sound:#2e8b57;--trained:#bfe8cf;--media:#dfe6f7}
@media(prefers-color-scheme:dark){:root{--loss:#ff7d7d;--warning:#ffc04d;--note:#9cbcdc;--sound:#63c793;
--trained:#1f5537;--media:#2a3555}}
h3{font-size:14px;margin:0 0 8px;display:flex;flex-wrap:wrap;gap:4px 12px;align-items:baseline;overflow-wrap:anywhere}
h3 .soft{margin-left:auto;font-weight:400}
header{border-left:5px solid var(--sound);padding-left:16px;overflow-wrap:anywhere}
header.loss{border-color:var(--loss)}header.warning{border-color:var(--warning)}
article,.finding{background:var(--card);border:1px solid var(--line);border-radius:10px}
.finding{padding:10px 14px;margin:8px 0;border-left:5px solid var(--note);overflow-wrap:anywhere}
.finding.loss{border-left-color:var(--loss)}.finding.warning{border-left-color:var(--warning)}
.finding summary{cursor:pointer}.finding ul{margin:8px 0;padding-left:20px}
.chosen td{font-weight:700;background:var(--media)}
article{padding:14px;margin:12px 0}article pre{margin:0;padding:0;border:0;font:13px/1.6 ui-monospace,monospace;
white-space:pre-wrap;overflow-wrap:anywhere;max-height:420px;overflow-y:auto}
mark{background:var(--trained);color:inherit;border-radius:3px}
.media{background:var(--media);border-radius:3px;padding:0 4px}.problem{color:var(--loss)}
.thumbs{display:flex;flex-wrap:wrap;gap:10px;margin:0 0 10px}.thumb{font-size:12px;text-align:center;max-width:152px}
.thumb img,.none{display:block;max-width:144px;max-height:144px;margin:0 auto 2px;border-radius:6px;
border:1px solid var(--line)}.none{padding:20px 12px;color:var(--soft)}
@media(max-width:560px){h3 .soft{margin-left:0}}
"""
_WORDS = {"loss": "loses samples", "warning": "looks wrong", "note": "worth knowing"}


def _page(diagnosis: Diagnosis) -> str:
    """Return the page of a diagnosis."""
    names = ", ".join(one.path for one in diagnosis.sets)
    findings = "".join(_finding(KINDS[name], one, diagnosis.total("rows")) for name, one in diagnosis.findings.items())
    sections = [
        f'<header class="{diagnosis.worst}"><p class="soft">{escape(names)}</p><h1>{escape(diagnosis.verdict)}</h1>',
        "".join(f'<p class="soft">{escape(note)}</p>' for note in diagnosis.notes()),
        f"</header>{html.facts(diagnosis.facts())}{_sets_table(diagnosis)}",
        section("Findings", findings or "<p>Nothing was found.</p>"),
        section("Distributions", f'<div class="charts">{"".join(map(chart, diagnosis.histograms))}</div>'),
        _forecast_section(diagnosis),
        _samples_section(diagnosis),
        f'<p class="soft">Examined in {diagnosis.seconds:.1f} s by tessera data doctor.</p>',
    ]
    return html.page(f"{names[:200]} · Tessera data doctor", sections, _STYLE)


def _sets_table(diagnosis: Diagnosis) -> str:
    if len(diagnosis.sets) < 2:
        return ""
    tokens = diagnosis.length is not None
    cells = []
    for facts in diagnosis.sets:
        counts = (facts.rows, facts.usable, facts.media, facts.tokens if tokens else facts.characters)
        trained = [f"{facts.trained / max(1, facts.tokens):.1%}"] if tokens else []
        cells.append([escape(facts.path), *(f"{count:,}" for count in counts), *trained])
    names = ["set", "samples", "usable", "media", *(["tokens", "trained on"] if tokens else ["characters"])]
    return html.table(names, cells)


def _finding(kind: Kind, finding: Finding, rows: int) -> str:
    locations = "".join(
        f"<li><code>{escape(location.where)}</code>"
        + (f" <b>{escape(location.id)}</b>" if location.id and location.id != location.where else "")
        + (f": {escape(location.detail)}" if location.detail else "")
        + "</li>"
        for location in finding.locations
    )
    more = finding.count - len(finding.locations)
    also = f'<li class="soft">and {more:,} more</li>' if more > 0 and finding.locations else ""
    share = f"{finding.count / max(1, rows):.2%} of samples" if finding.count <= rows else ""
    opened = " open" if kind.severity == "loss" else ""
    return (
        f'<details class="finding {kind.severity}"{opened}><summary><b>{finding.count:,}</b> {escape(kind.title)} '
        f'<span class="soft">{_WORDS[kind.severity]} · {share}</span></summary><ul>{locations}{also}</ul>'
        f'<p><span class="soft">Mend:</span> {escape(kind.mend)}</p></details>'
    )


def _forecast_section(diagnosis: Diagnosis) -> str:
    if not diagnosis.forecast:
        return ""
    names = ("row length", "dropped", "tokens lost", "cut by turns", "still dropped", "tokens lost", "padding", "rows")
    rows = []
    for rung in diagnosis.forecast:
        shares = (rung.dropped_share, rung.tokens_lost, rung.cut_share, rung.cut_dropped_share, rung.cut_tokens_lost)
        work = "" if rung.work is None else f"{rung.work:.2f} x mean"
        rows.append([f"{rung.length:,}", *(f"{s:.2%}" for s in (*shares, rung.padding)), f"{rung.rows:,}", work])
    above = (
        '<tr><th></th><th colspan="2">truncate=never</th><th colspan="3">truncate=turns</th><th colspan="3">packed</th>'
        "</tr>"
    )
    chosen = [number for number, rung in enumerate(diagnosis.forecast) if rung.chosen]
    estimated = any(rung.estimated for rung in diagnosis.forecast)
    note = '<p class="soft">Cutting and packing are estimated from a part of the samples.</p>' if estimated else ""
    table = html.table((*names, "heaviest row"), rows, above=above, chosen=chosen)
    return section("Row lengths", table + note)


def _samples_section(diagnosis: Diagnosis) -> str:
    if not diagnosis.samples:
        return ""
    trained = "trained on" if diagnosis.length is not None else "said by the assistant"
    legend = (
        f'<p class="soft"><mark>{trained}</mark> · only read · <span class="media">media</span>; '
        "the first samples of each set, then some drawn by chance</p>"
    )
    return section("Samples", legend + "".join(map(_article, diagnosis.samples)))


def _article(sample: Shown) -> str:
    counts = "" if sample.tokens is None else f"{sample.tokens:,} tokens, {sample.trained:,} trained on"
    id = escape(sample.id) if sample.id != sample.location else ""
    problem = f'<p class="problem">{escape(sample.problem)}</p>' if sample.problem else ""
    more = f'<div class="thumb soft">{sample.more_media} more</div>' if sample.more_media else ""
    thumbs = "".join(map(_thumb, sample.media)) + more
    tags = {"trained": "<mark>{}</mark>", "media": '<span class="media">{}</span>', "context": "{}"}
    words = "".join(tags[span.kind].format(escape(span.text)) for span in sample.spans)
    return (
        f"<article><h3><code>{escape(sample.location)}</code> {id}"
        f'<span class="soft">{counts}</span></h3>{problem}'
        + (f'<div class="thumbs">{thumbs}</div>' if thumbs else "")
        + (f"<pre>{words}</pre>" if words else "")
        + "</article>"
    )


def _thumb(thumb: Thumb) -> str:
    image = f'<img alt="" src="{escape(thumb.uri)}">' if thumb.uri else '<div class="none">no image</div>'
    tokens = "" if thumb.tokens is None else f"<br>{thumb.tokens:,} tokens"
    return (
        f'<div class="thumb" title="{escape(thumb.name)}">{image}'
        f'<div class="soft">{escape(thumb.size)}{tokens}</div></div>'
    )
