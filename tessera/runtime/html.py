"""Write HTML pages without scripts or external files, for light and dark mode.

The report of a run and the page of the data doctor use these functions. Each returns markup. Text arguments are
escaped; arguments named `body`, `cells` and `note` are markup.
"""

from __future__ import annotations

import html
import math
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise

from tessera.errors import printable

HOVERED = 100  # maximum number of intervals between the tooltips of a line chart
COLUMNS = 800  # columns of a line chart; each shows the lowest and the highest point of its range of steps
Point = tuple[float, float]
_WIDTH, _HEIGHT = 560, 230  # size of a line chart in SVG units
_MARGIN_LEFT, _MARGIN_RIGHT, _MARGIN_TOP, _MARGIN_BOTTOM = 58, 26, 14, 30

# CSS: colours of the light and the dark scheme, then the page, then the elements on a page.
_LIGHT = """--ink:#1c2024;--soft:#5d6675;--line:#d8dbe2;--page:#fbfbfc;--card:#fff;--main:#2f5fd0;--held:#d9622b;
--good:#2e8b57;--bad:#c23b3b"""
_DARK = """--ink:#e8eaee;--soft:#9aa3b2;--line:#343a46;--page:#14171c;--card:#1c2027;--main:#7da2ff;--held:#ff9b66;
--good:#63c793;--bad:#ff7d7d"""
_PAGE = """
*{box-sizing:border-box}body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);margin:0 auto;
padding:28px;max-width:1240px}h1{font-size:26px;line-height:1.25;margin:4px 0}h2{font-size:18px;margin:34px 0 12px}
pre{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:14px;overflow:auto;font-size:12.5px}
@media(max-width:560px){body{padding:14px}h1{font-size:21px}.fact b{font-size:16px}}
"""
_PARTS = """
p{margin:6px 0}.soft{color:var(--soft)}code{font-size:13px}
.facts,.charts{display:grid;gap:14px;margin:18px 0}.facts{grid-template-columns:repeat(auto-fit,minmax(156px,1fr))}
.charts{grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr))}
.fact,figure,.wide{background:var(--card);border:1px solid var(--line);border-radius:10px}
.fact{padding:12px 14px}.fact b{display:block;font-size:20px;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
figure{margin:0;padding:12px 14px}figcaption{font-weight:600;display:flex;justify-content:space-between;gap:10px}
figcaption span{font-weight:400;color:var(--soft);font-size:12px}figure p{font-size:12.5px;margin:4px 0 0}
svg{width:100%;height:auto;display:block}
svg text{fill:var(--soft);font-size:11px;paint-order:stroke;stroke:var(--card);stroke-width:3px}
.grid{stroke:var(--line)}polyline{fill:none;stroke-width:2}polyline.main{stroke:var(--main)}
polyline.held{stroke:var(--held)}polyline.raw{stroke:var(--main);opacity:.25;stroke-width:1}circle.held{fill:var(--held)}
circle.main{fill:var(--main)}
.bar{fill:var(--main);opacity:.85}.bar:hover{opacity:1}
line.share{stroke:var(--soft);stroke-dasharray:3 3}line.mark{stroke:var(--bad);stroke-dasharray:4 4}
svg text.mark{fill:var(--bad)}.legend{font-size:12px;color:var(--soft)}.key{margin-right:14px}
.key i{display:inline-block;width:14px;height:4px;margin-right:5px;vertical-align:middle;background:var(--main)}
.key.raw i{opacity:.3}.key.held i{background:var(--held)}
rect.over{fill:transparent}.drawn{position:relative;align-self:flex-start}svg.shapes{position:absolute;inset:0;width:100%;height:100%}
.shape{fill:transparent;stroke:var(--main);stroke-width:2}.shape.good{stroke:var(--good)}.shape.held{stroke:var(--held)}
.wide{overflow-x:auto;padding:6px 14px}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
td,th{padding:5px 10px;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th{font-weight:600;color:var(--soft);font-size:13px}
td:first-child,th:first-child,.sentences td,.sentences th{text-align:left}.sentences td{white-space:normal}
tr:last-child td{border-bottom:0}
"""
STYLE = f":root{{color-scheme:light dark;{_LIGHT}}}@media(prefers-color-scheme:dark){{:root{{{_DARK}}}}}{_PAGE}{_PARTS}"
NOTEBOOK = "tessera-output"  # CSS class of Tessera's output inside of another page, such as a notebook


def page(title: str, body: Iterable[str], style: str = "") -> str:
    """Return a full page. `style`: additional CSS. A content security policy forbids the page to load anything."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; media-src data:; '
        "style-src 'unsafe-inline'\">"
        f'<link rel="icon" href="data:,"><title>{escape(title)[:240]}</title><style>{STYLE}{style}</style></head>'
        f"<body>{''.join(body)}</body></html>"
    )


def fragment(body: Iterable[str]) -> str:
    """Return markup for a notebook cell. Its styles apply to this markup only, not to the rest of the notebook."""
    rules = re.sub(r"([^{}]+)\{", _inside_notebook, _PARTS)
    colors = f".{NOTEBOOK}{{{_LIGHT};color:var(--ink);font:14px/1.5 system-ui,sans-serif;max-width:1000px}}"
    dark = f"@media(prefers-color-scheme:dark){{.{NOTEBOOK}{{{_DARK}}}}}"
    # Set a background, because text colours follow the system's colour scheme, and the notebook's theme may differ.
    ground = f".{NOTEBOOK}{{background:var(--page);padding:10px;border-radius:10px}}"
    return f'<div class="{NOTEBOOK}"><style>{colors}{dark}{ground}{rules}</style>{"".join(body)}</div>'


def _inside_notebook(rule: re.Match[str]) -> str:
    return ",".join(f".{NOTEBOOK} {selector.strip()}" for selector in rule[1].split(",")) + "{"


def escape(text: str) -> str:
    """Escape markup, and replace characters that are invalid in HTML or reverse the direction of text."""
    return html.escape(printable(text, allowed="\n\t"))


@dataclass(frozen=True)
class Shape:
    """Hold a box (x1, y1, x2, y2) or a point (x, y) to draw on an image, in pixels of the image."""

    numbers: tuple[float, ...]
    name: str = ""
    kind: str = "main"  # colour: main, held or good


MOST_SHAPES = 200  # boxes and points that are drawn on an image, at most


def overlay(width: int, height: int, shapes: Sequence[Shape]) -> str:
    """Return an SVG with boxes and points, to draw over an image in an element of the class `drawn`."""
    marks = []
    for shape in shapes[:MOST_SHAPES]:
        if len(shape.numbers) not in (2, 4) or not all(map(math.isfinite, shape.numbers)):
            continue
        x, y = shape.numbers[::2], shape.numbers[1::2]
        if len(x) == 1:
            name, at = "circle", f'cx="{x[0]:.6g}" cy="{y[0]:.6g}" r="{max(width, height) / 60:.4g}"'
        else:
            size = f'width="{abs(x[1] - x[0]):.6g}" height="{abs(y[1] - y[0]):.6g}"'
            name, at = "rect", f'x="{min(x):.6g}" y="{min(y):.6g}" {size}'
        title = f"<title>{escape(shape.name[:200])}</title>" if shape.name else ""
        style = f'class="shape {escape(shape.kind)}" vector-effect="non-scaling-stroke"'
        marks.append(f"<{name} {at} {style}>{title}</{name}>")
    view = f'viewBox="0 0 {max(1, width)} {max(1, height)}"'
    return f'<svg class="shapes" {view}>{"".join(marks)}</svg>' if marks else ""


def section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Return a grid of cards, each with a name and a value."""
    cards = "".join(
        f'<div class="fact"><span class="soft">{escape(name)}</span><b>{escape(value)}</b></div>'
        for name, value in pairs
    )
    return f'<div class="facts">{cards}</div>'


def table(
    head: Sequence[str],
    cells: Iterable[Sequence[str]],
    *,
    chosen: Iterable[int] = (),
    text: bool = False,
) -> str:
    """Return a table. `chosen`: indices of the rows to highlight. `text`: whether cells are sentences, not numbers."""
    marked = set(chosen)
    rows = ""
    for number, row in enumerate(cells):
        opened = '<tr class="chosen">' if number in marked else "<tr>"
        rows += opened + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>"
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    kind = ' class="sentences"' if text else ""
    return f'<div class="wide"><table{kind}><tr>{names}</tr>{rows}</table></div>'


@dataclass(frozen=True)
class Series:
    label: str
    points: Sequence[Point]
    style: str = "main"  # main, raw (pale) or held (held-out data)
    dots: bool = False


def line_chart(title: str, series: Sequence[Series], log_scale: bool = False, from_zero: bool = False) -> str:
    """Return a figure over steps with axes, a legend and tooltips. `log_scale`, `from_zero`: options of the value axis.

    Values that are not finite, or not positive on a logarithmic scale, are left out. The title counts values that
    are not finite.
    """
    finite = [replace(line, points=[p for p in line.points if math.isfinite(p[1])]) for line in series]
    lost = sum(len(line.points) for line in series) - sum(len(line.points) for line in finite)
    lines = [replace(line, points=[p for p in line.points if not log_scale or p[1] > 0]) for line in finite]
    points = [point for line in lines for point in line.points]
    up: Callable[[float], float] = math.log10 if log_scale else lambda y: y
    if not points:
        return f"<figure><figcaption>{escape(title)}</figcaption><p>nothing recorded</p></figure>"
    x_low, x_high = min([0.0, *(x for x, _ in points)]), max(x for x, _ in points)
    values = [up(y) for _, y in points]
    y_low, y_high = (0.0, 1.05 * max(values)) if from_zero else (min(values), max(values))
    if y_high - y_low <= 1e-9 * max(abs(y_low), abs(y_high)):  # all values are equal
        room = 0.1 * abs(y_high) or 0.5
        y_low, y_high = y_low - room, y_high + room

    def across(x: float) -> float:
        return _MARGIN_LEFT + (x - x_low) / max(x_high - x_low, 1e-12) * (_WIDTH - _MARGIN_LEFT - _MARGIN_RIGHT)

    def down(value: float) -> float:
        return _HEIGHT - _MARGIN_BOTTOM - (value - y_low) / (y_high - y_low) * (_HEIGHT - _MARGIN_TOP - _MARGIN_BOTTOM)

    parts = []
    for i in range(5):
        value = y_low + i / 4 * (y_high - y_low)
        y = down(value)
        label = short_number(10**value if log_scale else value)
        right = _WIDTH - _MARGIN_RIGHT
        parts.append(f'<line class="grid" x1="{_MARGIN_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(_MARGIN_LEFT - 6, y + 4, label, "end"))
    for x in _ticks(x_low, x_high):
        parts.append(_text(across(x), _HEIGHT - 10, f"{round(x):,}", "middle"))
    for line in lines:
        drawn = [(across(x), down(up(y))) for x, y in _thin(line.points, x_low, x_high)]
        if line.dots:
            parts += [f'<circle class="{line.style}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in drawn]
        else:
            corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in drawn)
            parts.append(f'<polyline class="{line.style}" points="{corners}"/>')
    parts += _tooltips(lines, across)
    keys = [f'<span class="key {line.style}"><i></i>{escape(line.label)}</span>' for line in lines if line.points]
    note = f" ({lost} non-finite values left out)" if lost else ""
    legend = f'<div class="legend">{"".join(keys)}</div>'
    return _figure(title + note, "", _svg(_WIDTH, _HEIGHT, title, parts), legend)


def _ticks(low: float, high: float) -> list[float]:
    """Return at most 6 evenly spaced ticks of an axis: multiples of 1, 2, 5, 10, 20, ..."""
    steps = (factor * 10**digits for digits in count() for factor in (1, 2, 5))
    step = next(step for step in steps if high - low <= 5 * step)
    return [float(tick) for tick in range(math.ceil(low / step) * step, math.floor(high) + 1, step)]


def bar_chart(
    title: str,
    unit: str,
    bars: Sequence[tuple[float, str]],
    *,
    labels: Iterable[tuple[float, str]] = (),
    lines: Iterable[tuple[float, str, str]] = (),
    note: str = "",
) -> str:
    """Return a figure of vertical bars, such as a histogram.

    `bars`: (value, tooltip) of each bar. `labels`: (position in bars, text) below the bars. `lines`: vertical lines as
    (position in bars, CSS class `share` or `mark`, text). `note`: markup below the chart.
    """
    width, height, margin, top, bottom = 460, 150, 8, 8, 22
    largest = max((value for value, _ in bars), default=0.0) or 1.0
    step, full = (width - 2 * margin) / max(1, len(bars)), height - top - bottom
    parts = []
    for number, (value, tooltip) in enumerate(bars):
        tall = max(1.5, full * value / largest) if value else 0.0  # a minimum height, so that small values are visible
        parts.append(
            f'<rect class="bar" x="{margin + number * step + 0.5:.1f}" y="{top + full - tall:.1f}" '
            f'width="{max(1.0, step - 1):.1f}" height="{tall:.1f}"><title>{escape(tooltip)}</title></rect>'
        )
    for number, (position, style, text) in enumerate(lines):
        x = margin + position * step
        near_end = x > width - 60
        parts.append(f'<line class="{style}" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{height - bottom}"/>')
        # Put each text lower than the one before: vertical lines may be close together.
        anchor = "end" if near_end else "start"
        parts.append(_text(x + (-4 if near_end else 4), top + 8 + 12 * number, text, anchor, style))
    for position, text in labels:
        anchor = "start" if position == 0 else "end" if position == len(bars) else "middle"
        parts.append(_text(margin + position * step, height - 6, text, anchor))
    return _figure(title, unit, _svg(width, height, title, parts), note)


def short_number(value: float) -> str:
    """Return a number as short text for the label of an axis."""
    size = abs(value)
    if 1000 <= size < 1_000_000:
        return f"{value:,.0f}"
    return f"{value:.1e}" if size and (size >= 1000 or size < 0.001) else f"{value:.3g}"


def _figure(title: str, unit: str, chart: str, note: str) -> str:
    right = f"<span>{escape(unit)}</span>" if unit else ""
    return f"<figure><figcaption>{escape(title)}{right}</figcaption>{chart}{note}</figure>"


def _svg(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'


def _text(x: float, y: float, text: str, anchor: str, style: str = "") -> str:
    kind = f' class="{style}"' if style else ""
    return f'<text{kind} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _tooltips(series: Sequence[Series], across: Callable[[float], float]) -> list[str]:
    """Return invisible strips over the chart, each with a tooltip that lists the values of its steps."""
    ordered = [(sorted(points), points, line) for line in series if (points := dict(line.points))]
    places = sorted({x for xs, _, _ in ordered for x in xs})
    if not places:
        return []
    last = len(places) - 1
    chosen = sorted({round(at * last / min(HOVERED, last or 1)) for at in range(min(HOVERED, last) + 1)})
    xs = [places[at] for at in chosen]
    marks = [across(x) for x in xs]
    edges = [float(_MARGIN_LEFT), *((a + b) / 2 for a, b in pairwise(marks)), float(_WIDTH - _MARGIN_RIGHT)]
    parts = []
    for number, x in enumerate(xs):
        lines = [f"step {round(x):,}"]
        for line_xs, points, line in ordered:
            # If a line has no point at this x, use its nearest point inside of the strip.
            first = max(0, bisect_left(line_xs, x) - 1)
            near = min(line_xs[first : first + 2], key=lambda other: abs(other - x))
            if edges[number] <= across(near) <= edges[number + 1] or near == x:
                lines.append(f"{line.label}  {points[near]:.5g}")
        width = max(0.5, edges[number + 1] - edges[number])
        parts.append(
            f'<rect class="over" x="{edges[number]:.1f}" y="{_MARGIN_TOP}" width="{width:.1f}" '
            f'height="{_HEIGHT - _MARGIN_TOP - _MARGIN_BOTTOM}"><title>{escape(chr(10).join(lines))}</title></rect>'
        )
    return parts


def _thin(points: Sequence[Point], x_low: float, x_high: float) -> list[Point]:
    """Keep the lowest and the highest point of each column, in their order, so that no peak is lost."""
    columns: dict[int, list[Point]] = {}
    for point in points:
        columns.setdefault(int((point[0] - x_low) * COLUMNS / max(1e-12, x_high - x_low)), []).append(point)
    thin: list[Point] = []
    for column in columns.values():
        thin += sorted({min(column, key=lambda p: p[1]), max(column, key=lambda p: p[1])})
    return thin
