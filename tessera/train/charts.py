"""Line charts as inline SVG: no library, no script needed to see them, readable in light and dark."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 560, 230
LEFT, RIGHT, TOP, BOTTOM = 58, 26, 14, 30


@dataclass(frozen=True)
class Series:
    label: str
    points: Sequence[tuple[float, float]]
    style: str  # css class: raw, main or held
    dots: bool = False


def line_chart(title: str, series: Sequence[Series], *, log_scale: bool = False) -> str:
    """A figure with axes, few grid lines and a legend. Non-finite points are left out and counted in the caption."""
    finite = [Series(s.label, [p for p in s.points if math.isfinite(p[1])], s.style, s.dots) for s in series]
    lost = sum(len(s.points) for s in series) - sum(len(s.points) for s in finite)
    points = [p for s in finite for p in s.points if not log_scale or p[1] > 0]
    if not points:
        return f"<figure><figcaption>{html.escape(title)}</figcaption><p>nothing recorded</p></figure>"
    x_low, x_high = 0.0, max(p[0] for p in points)
    values = sorted(_scale(p[1], log_scale) for p in points)
    y_low, y_high = values[0], values[-1]
    if y_high - y_low < 1e-12:
        y_low, y_high = y_low - 0.5, y_high + 0.5

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / max(x_high - x_low, 1e-12)
        up = (_scale(y, log_scale) - y_low) / (y_high - y_low)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    parts = [_grid(x_low, x_high, y_low, y_high, log_scale)]
    for one in finite:
        places = [place(x, y) for x, y in _thin(one.points) if not log_scale or y > 0]
        if one.dots:
            parts += [f'<circle class="{one.style}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in places]
        else:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(f'<polyline class="{one.style}" points="{path}"/>')
    legend = "".join(f'<span class="key {s.style}">{html.escape(s.label)}</span>' for s in finite if s.points)
    note = f" ({lost} non-finite values left out)" if lost else ""
    return (
        f"<figure><figcaption>{html.escape(title)}{note}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">{"".join(parts)}</svg>'
        f'<div class="legend">{legend}</div></figure>'
    )


def smooth(points: Sequence[tuple[float, float]], weight: float = 0.9) -> list[tuple[float, float]]:
    """Exponential average without the pull towards zero at the start."""
    out: list[tuple[float, float]] = []
    total = norm = 0.0
    for x, y in points:
        if math.isfinite(y):
            total, norm = weight * total + (1 - weight) * y, weight * norm + (1 - weight)
            out.append((x, total / norm))
    return out


def _scale(value: float, log_scale: bool) -> float:
    return math.log10(value) if log_scale else value


def _thin(points: Sequence[tuple[float, float]], most: int = 800) -> Sequence[tuple[float, float]]:
    stride = max(1, len(points) // most)
    return points if stride == 1 else [*points[::stride], points[-1]]


def _grid(x_low: float, x_high: float, y_low: float, y_high: float, log_scale: bool) -> str:
    parts = []
    for i in range(5):
        share = i / 4
        y = HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)
        value = y_low + share * (y_high - y_low)
        text = _number(10**value if log_scale else value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
        x = LEFT + share * (WIDTH - LEFT - RIGHT)
        step = _number(x_low + share * (x_high - x_low), whole=True)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 10}" text-anchor="middle">{step}</text>')
    return "".join(parts)


def _number(value: float, whole: bool = False) -> str:
    if whole:
        return f"{round(value):,}"
    size = abs(value)
    if size and (size >= 10_000 or size < 0.001):
        return f"{value:.1e}"
    return f"{value:.3g}"
