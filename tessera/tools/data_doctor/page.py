"""Write a diagnosis as one HTML page; everything from data is escaped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tessera.runtime import html
from tessera.runtime.html import escape, section
from tessera.tools.data_doctor.findings import KINDS, Finding, Kind
from tessera.tools.data_doctor.histogram import chart
from tessera.tools.data_doctor.show import Shown, Thumb

if TYPE_CHECKING:
    from tessera.tools.data_doctor.diagnosis import Diagnosis

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


def html_page(diagnosis: Diagnosis) -> str:
    """Return the page of a diagnosis."""
    names = ", ".join(one.path for one in diagnosis.sets)
    findings = "".join(_finding(KINDS[name], one, diagnosis.total("rows")) for name, one in diagnosis.findings.items())
    sections = [
        f'<header class="{diagnosis.worst}"><p class="soft">{escape(names)}</p><h1>{escape(diagnosis.verdict)}</h1>',
        "".join(f'<p class="soft">{escape(note)}</p>' for note in diagnosis.notes()),
        f"</header>{html.facts(diagnosis.facts())}{_sets(diagnosis)}",
        section("Findings", findings or "<p>Nothing was found.</p>"),
        section("Distributions", f'<div class="charts">{"".join(map(chart, diagnosis.histograms))}</div>'),
        _forecast(diagnosis),
        _samples(diagnosis),
        f'<p class="soft">Examined in {diagnosis.seconds:.1f} s by tessera data doctor.</p>',
    ]
    return html.page(f"{names[:200]} · Tessera data doctor", sections, _STYLE)


def _sets(diagnosis: Diagnosis) -> str:
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


def _forecast(diagnosis: Diagnosis) -> str:
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


def _samples(diagnosis: Diagnosis) -> str:
    if not diagnosis.samples:
        return ""
    trained = "trained on" if diagnosis.length is not None else "said by the assistant"
    legend = (
        f'<p class="soft"><mark>{trained}</mark> · only read · <span class="media">media</span>; '
        "the first samples of each set, then some drawn by chance</p>"
    )
    return section("Samples", legend + "".join(map(_sample, diagnosis.samples)))


def _sample(sample: Shown) -> str:
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
