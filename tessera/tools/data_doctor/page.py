"""A diagnosis as one HTML file: no script, nothing from elsewhere; everything from data is escaped."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from tessera.tools.data_doctor.findings import Finding, Kind
from tessera.tools.data_doctor.histogram import svg
from tessera.tools.data_doctor.show import Shown, Thumb
from tessera.tools.data_doctor.style import STYLE

if TYPE_CHECKING:
    from tessera.tools.data_doctor.diagnosis import Diagnosis

_WORDS = {"loss": "loses samples", "warning": "looks wrong", "note": "worth knowing"}


def html_page(diagnosis: Diagnosis) -> str:
    names = ", ".join(one.path for one in diagnosis.sets)
    sections = [
        f'<header class="{diagnosis.worst}"><p class="soft">{_escape(names)}</p><h1>{_escape(diagnosis.verdict)}</h1>',
        "".join(f'<p class="soft">{_escape(note)}</p>' for note in diagnosis.notes()),
        f"</header>{_facts(diagnosis)}{_sets(diagnosis)}",
        _findings(diagnosis),
        _section("Distributions", f'<div class="charts">{"".join(map(svg, diagnosis.histograms))}</div>'),
        _forecast(diagnosis),
        _samples(diagnosis),
        f'<p class="soft">Examined in {diagnosis.seconds:.1f} s by tessera data doctor.</p>',
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'\">"
        f'<link rel="icon" href="data:,"><title>{_escape(names)[:200]} · Tessera data doctor</title>'
        f"<style>{STYLE}</style></head><body>{''.join(sections)}</body></html>"
    )


def _escape(text: str) -> str:
    """Besides markup: characters that a browser may not have in a page, and text that turns the writing around."""
    shown = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
    return html.escape(shown, quote=True)


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>"


def _facts(diagnosis: Diagnosis) -> str:
    cards = "".join(
        f'<div class="fact"><span class="soft">{_escape(name)}</span><b>{_escape(value)}</b></div>'
        for name, value in diagnosis.facts()
    )
    return f'<div class="facts">{cards}</div>'


def _sets(diagnosis: Diagnosis) -> str:
    if len(diagnosis.sets) < 2:
        return ""
    tokens = diagnosis.length is not None
    rows = []
    for one in diagnosis.sets:
        cells = [f"{one.rows:,}", f"{one.usable:,}", f"{one.media:,}", f"{one.tokens if tokens else one.characters:,}"]
        cells += [f"{one.trained / max(1, one.tokens):.1%}"] if tokens else []
        rows.append(f"<tr><td>{_escape(one.path)}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    names = ["set", "samples", "usable", "media", *(["tokens", "trained on"] if tokens else ["characters"])]
    head = "".join(f"<th>{name}</th>" for name in names)
    return f'<div class="wide"><table><tr>{head}</tr>{"".join(rows)}</table></div>'


def _findings(diagnosis: Diagnosis) -> str:
    found = diagnosis.findings()
    if not found:
        return _section("Findings", "<p>Nothing was found.</p>")
    rows = diagnosis.total("rows")
    return _section("Findings", "".join(_finding(kind, one, rows) for _, kind, one in found))


def _finding(kind: Kind, found: Finding, rows: int) -> str:
    places = "".join(
        f"<li><code>{_escape(place.where)}</code>"
        + (f" <b>{_escape(place.id)}</b>" if place.id and place.id != place.where else "")
        + (f": {_escape(place.detail)}" if place.detail else "")
        + "</li>"
        for place in found.places
    )
    more = found.count - len(found.places)
    also = f'<li class="soft">and {more:,} more</li>' if more > 0 and found.places else ""
    share = f"{found.count / max(1, rows):.2%} of samples" if found.count <= rows else ""
    opened = " open" if kind.severity == "loss" else ""
    return (
        f'<details class="finding {kind.severity}"{opened}><summary><b>{found.count:,}</b> {_escape(kind.title)} '
        f'<span class="soft">{_WORDS[kind.severity]} · {share}</span></summary><ul>{places}{also}</ul>'
        f'<p><span class="soft">Mend:</span> {_escape(kind.mend)}</p></details>'
    )


def _forecast(diagnosis: Diagnosis) -> str:
    if not diagnosis.forecast:
        return ""
    names = (
        "row length",
        "dropped",
        "tokens lost",
        "cut by turns",
        "still dropped",
        "tokens lost",
        "padding",
        "rows",
        "heaviest row",
    )
    rows = []
    for rung in diagnosis.forecast:
        shares = (
            rung.dropped_share, rung.tokens_lost, rung.cut_share, rung.cut_dropped_share, rung.cut_tokens_lost,
            rung.padding,
        )  # fmt: skip
        cells = [
            f"{rung.length:,}",
            *(f"{share:.2%}" for share in shares),
            f"{rung.rows:,}",
            "" if rung.work is None else f"{rung.work:.2f} x mean",
        ]
        chosen = ' class="chosen"' if rung.chosen else ""
        rows.append(f"<tr{chosen}>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    head = (
        '<tr><th></th><th colspan="2">too_long=drop</th><th colspan="3">too_long=turns</th><th colspan="3">packed</th>'
        f"</tr><tr>{''.join(f'<th>{name}</th>' for name in names)}</tr>"
    )
    estimated = any(rung.estimated for rung in diagnosis.forecast)
    note = '<p class="soft">Cutting and packing are estimated from a part of the samples.</p>' if estimated else ""
    return _section(
        "Row lengths", f'<div class="wide"><table class="numbers">{head}{"".join(rows)}</table></div>{note}'
    )


def _samples(diagnosis: Diagnosis) -> str:
    if not diagnosis.samples:
        return ""
    trained = "trained on" if diagnosis.length is not None else "said by the assistant"
    legend = (
        f'<p class="soft"><mark>{trained}</mark> · only read · <span class="media">media</span>; '
        "the first samples of each set, then some drawn by chance</p>"
    )
    return _section("Samples", legend + "".join(map(_sample, diagnosis.samples)))


def _sample(shown: Shown) -> str:
    counts = "" if shown.tokens is None else f"{shown.tokens:,} tokens, {shown.trained:,} trained on"
    problem = f'<p class="problem">{_escape(shown.problem)}</p>' if shown.problem else ""
    more = f'<div class="thumb soft">{shown.more_media} more</div>' if shown.more_media else ""
    thumbs = "".join(map(_thumb, shown.media)) + more
    tags = {"trained": "<mark>{}</mark>", "media": '<span class="media">{}</span>', "context": "{}"}
    words = "".join(tags[piece.kind].format(_escape(piece.text)) for piece in shown.pieces)
    return (
        f"<article><h3><code>{_escape(shown.place)}</code> {_escape(shown.id) if shown.id != shown.place else ''}"
        f'<span class="soft">{counts}</span></h3>{problem}'
        + (f'<div class="thumbs">{thumbs}</div>' if thumbs else "")
        + (f"<pre>{words}</pre>" if words else "")
        + "</article>"
    )


def _thumb(thumb: Thumb) -> str:
    picture = f'<img alt="" src="{_escape(thumb.uri)}">' if thumb.uri else '<div class="none">no picture</div>'
    tokens = "" if thumb.tokens is None else f"<br>{thumb.tokens:,} tokens"
    return (
        f'<div class="thumb" title="{_escape(thumb.name)}">{picture}'
        f'<div class="soft">{_escape(thumb.size)}{tokens}</div></div>'
    )
