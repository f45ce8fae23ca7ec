"""The result of the data doctor, and its output as terminal text, as an HTML page and as JSON.

Texts of a data set are untrusted: control characters are replaced for the terminal, and the page escapes HTML.
"""

from __future__ import annotations

import functools
import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tessera.errors import printable
from tessera.runtime import html
from tessera.runtime.html import escape, section
from tessera.tools.data_doctor.collect import Rung, SetFacts
from tessera.tools.data_doctor.findings import KINDS, SEVERITIES, Finding, Kind, Severity
from tessera.tools.data_doctor.histogram import Histogram, bars, chart, short
from tessera.tools.data_doctor.look import Shown, Thumb

WITHOUT_A_MODEL = (
    "Lengths are in characters. With --recipe or --model the doctor also counts tokens, marks the text that is trained "
    "on, and forecasts how many samples a row length drops."
)
_WIDE = 110
_MARKS: dict[Severity, str] = {"loss": "✗", "warning": "!", "note": "·"}
_MAX_SHOWN = 700  # limit of printed characters per sample
_harmless = functools.partial(printable, allowed="")  # for a part of a line: line ends are replaced, too


@dataclass(frozen=True)
class Diagnosis:
    sets: tuple[SetFacts, ...]
    findings: dict[str, Finding]  # kind -> finding, worst first
    histograms: tuple[Histogram, ...]
    forecast: tuple[Rung, ...]
    samples: tuple[Shown, ...]
    length: int | None  # tokens of a row; None: examined without a model
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
        """Return 1 if a run would drop samples, otherwise 0."""
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
        return sum(getattr(data_set, name) for data_set in self.sets)

    def facts(self) -> list[tuple[str, str]]:
        """Return the main figures as (name, value)."""
        rows = self.total("rows")
        facts = [("samples", f"{rows:,}"), ("usable", f"{self.total('usable') / max(1, rows):.2%}")]
        if self.length is None:
            facts.append(("characters", f"{self.total('characters'):,}"))
        else:
            tokens = max(1, self.total("tokens"))
            facts += [
                ("tokens", f"{self.total('tokens'):,}"),
                ("trained on", f"{self.total('trained') / tokens:.1%}"),
            ]
            padding = next((rung.padding for rung in self.forecast if rung.chosen), None)
            if padding is not None:
                facts.append((f"padding at {self.length:,}", f"{padding:.1%}"))
        facts += [(kind, f"{self.total(kind):,}") for kind in ("images", "videos", "audios") if self.total(kind)]
        return facts

    def notes(self) -> list[str]:
        """Return sentences about the limits of this examination."""
        said = [] if self.length is not None else [WITHOUT_A_MODEL]
        if self.decoded:
            said.append("Every image and video was decoded, and the first minute of every recording was examined.")
        elif self.total("media"):
            heard = ", and finds silent and clipped recordings" if self.total("audios") else ""
            said.append(f"Only headers of media were read; --decode decodes all media{heard}.")
        return said

    def sets_table(self) -> tuple[list[str], list[list[str]]]:
        """Return the names of columns, and a row for each data set."""
        tokens = self.length is not None
        names = ["set", "samples", "usable", "media", *(["tokens", "trained on"] if tokens else ["characters"])]
        rows = []
        for facts in self.sets:
            counts = (facts.rows, facts.usable, facts.media, facts.tokens if tokens else facts.characters)
            trained = [f"{facts.trained / max(1, facts.tokens):.1%}"] if tokens else []
            rows.append([facts.path, *(f"{count:,}" for count in counts), *trained])
        return names, rows

    def forecast_table(self) -> tuple[list[str], list[list[str]]]:
        """Return the names of columns, and a row for each length."""
        names = ["row length", "dropped", "tokens lost", "padding", "rows", "heaviest row"]
        rows = []
        for rung in self.forecast:
            shares = (f"{share:.2%}" for share in (rung.dropped_share, rung.tokens_lost, rung.padding))
            work = "" if rung.work is None else f"{rung.work:.2f} x mean"
            rows.append([f"{rung.length:,}{' <' if rung.chosen else ''}", *shares, f"{rung.rows:,}", work])
        return names, rows

    # ------------------------------------------------------------------------------------------ forms

    def lines(self, *, samples: int = 3) -> list[str]:
        return _terminal_lines(self, samples)

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
            "sets": [asdict(data_set) for data_set in self.sets],
            "findings": [
                {"kind": name, **asdict(KINDS[name]), **asdict(finding)} for name, finding in self.findings.items()
            ],
            "histograms": [asdict(histogram) for histogram in self.histograms],
            "forecast": [asdict(rung) for rung in self.forecast],
        }
        return json.dumps(facts, indent=2, ensure_ascii=True)


# ---------------------------------------------------------------------------------------------- terminal


def _terminal_lines(diagnosis: Diagnosis, samples: int) -> list[str]:
    """Return the diagnosis as lines for the terminal, without control characters from the data set."""
    lines = [diagnosis.verdict, "", "   ".join(f"{name} {value}" for name, value in diagnosis.facts()), ""]
    if len(diagnosis.sets) > 1:
        lines += [*_aligned(*diagnosis.sets_table()), ""]
    for name, finding in diagnosis.findings.items():
        kind = KINDS[name]
        lines.append(f"{_MARKS[kind.severity]} {kind.title}: {finding.count:,}")
        for location in finding.locations:
            id = f" ({location.id})" if location.id and location.id != location.where else ""
            code = f" [{location.code}]" if location.code else ""
            lines += _wrapped(_harmless(f"{location.where}{id}: {location.detail}{code}"), "      ")
        lines += _wrapped(f"mend: {kind.mend}", "      ")
    if diagnosis.findings:
        lines.append("")
    for histogram in diagnosis.histograms:
        lines.append(f"{histogram.title:>26} {short(histogram.min):>7} {bars(histogram)} {short(histogram.max)}")
        lines.append(f"{'':>26}         {histogram.summary()}")
    if diagnosis.forecast:
        lines += ["", *_aligned(*diagnosis.forecast_table())]
    for sample in diagnosis.samples[:samples]:
        lines += ["", *_sample(sample)]
    return [*lines, "", *(line for note in diagnosis.notes() for line in _wrapped(note, ""))]


def _aligned(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table as lines of text. The first column is aligned left, the others right."""
    table = [names, *rows]
    widths = [max(len(row[at]) for row in table) for at in range(len(names))]
    return [
        "  ".join([_harmless(row[0]).ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in table
    ]


def _sample(sample: Shown) -> list[str]:
    """Return a sample as lines of text. ⟦...⟧ marks text that is trained on, [...] marks media."""
    counts = "" if sample.tokens is None else f"  {sample.tokens:,} tokens, {sample.trained:,} trained on"
    lines = [_harmless(f"── {sample.location} ({sample.id})") + counts]
    if sample.problem:
        lines.append(_harmless(sample.problem))
    for thumb in sample.media:
        tokens = "" if thumb.tokens is None else f", {thumb.tokens:,} tokens"
        lines.append(f"   {_harmless(thumb.name)}: {thumb.size}{tokens}")
    text, room = "", _MAX_SHOWN
    for span in sample.spans:
        words = printable(span.text, allowed="\n\t")
        words = words if len(words) <= room else words[: max(0, room)] + "…"
        room -= len(words)
        text += {"trained": f"⟦{words}⟧", "media": f"[{words}]", "context": words}[span.kind]
        if room <= 0:
            break
    return [*lines, *text.rstrip("\n").split("\n")]


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, _WIDE, initial_indent=indent, subsequent_indent=indent + "  ") or [indent]


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
.thumb .drawn{display:inline-block}.thumb .drawn img{margin:0}
.thumbs{display:flex;flex-wrap:wrap;gap:10px;margin:0 0 10px}.thumb{font-size:12px;text-align:center;max-width:152px;
overflow-wrap:anywhere}
.thumb img,.none{display:block;max-width:144px;max-height:144px;margin:0 auto 2px;border-radius:6px;
border:1px solid var(--line)}.none{padding:20px 12px;color:var(--soft)}
.thumb.sound{max-width:288px;text-align:left}.thumb.sound img{max-height:none;width:288px;max-width:100%}
.sound audio{width:288px;max-width:100%;height:32px;display:block}
@media(max-width:560px){h3 .soft{margin-left:0}}
"""
_WORDS = {"loss": "loses samples", "warning": "looks wrong", "note": "worth knowing"}


def _page(diagnosis: Diagnosis) -> str:
    """Return the diagnosis as an HTML page."""
    chosen = [number for number, rung in enumerate(diagnosis.forecast) if rung.chosen]
    names = ", ".join(data_set.path for data_set in diagnosis.sets)
    findings = "".join(
        _finding(KINDS[name], each, diagnosis.total("rows")) for name, each in diagnosis.findings.items()
    )
    sections = [
        f'<header class="{diagnosis.worst}"><p class="soft">{escape(names)}</p><h1>{escape(diagnosis.verdict)}</h1>',
        "".join(f'<p class="soft">{escape(note)}</p>' for note in diagnosis.notes()),
        f"</header>{html.facts(diagnosis.facts())}",
        html.table(*diagnosis.sets_table()) if len(diagnosis.sets) > 1 else "",
        section("Findings", findings or "<p>Nothing was found.</p>"),
        section("Distributions", f'<div class="charts">{"".join(map(chart, diagnosis.histograms))}</div>'),
        section("Row lengths", html.table(*diagnosis.forecast_table(), chosen=chosen)) if diagnosis.forecast else "",
        _samples_section(diagnosis),
        f'<p class="soft">Examined in {diagnosis.seconds:.1f} s by tessera data doctor.</p>',
    ]
    return html.page(f"{names[:200]} · Tessera data doctor", sections, _STYLE)


def _finding(kind: Kind, finding: Finding, rows: int) -> str:
    locations = "".join(
        f"<li><code>{escape(location.where)}</code>"
        + (f" <b>{escape(location.id)}</b>" if location.id and location.id != location.where else "")
        + (f": {escape(location.detail)}" if location.detail else "")
        + (f' <code class="soft">{escape(location.code)}</code>' if location.code else "")
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
    image = f'<img alt="" src="{escape(thumb.uri)}">' if thumb.uri else '<div class="none">no preview</div>'
    if thumb.uri and thumb.shapes:
        image = f'<div class="drawn">{image}{html.overlay(*thumb.pixels, thumb.shapes)}</div>'
    tokens = "" if thumb.tokens is None else f"<br>{thumb.tokens:,} tokens"
    if thumb.sound:
        image += f'<audio controls preload="metadata" src="{escape(thumb.sound)}"></audio>'
    kind = "thumb sound" if thumb.uri and thumb.pixels == (0, 0) else "thumb"
    # An image needs no name. Recordings do, because their pictures look alike.
    name = "" if thumb.uri and not thumb.sound else f"{escape(thumb.name)}<br>"
    return (
        f'<div class="{kind}" title="{escape(thumb.name)}">{image}'
        f'<div class="soft">{name}{escape(thumb.size)}{tokens}</div></div>'
    )
