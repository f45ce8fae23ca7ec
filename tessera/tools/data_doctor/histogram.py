"""Distributions in few numbers: bins and percentiles of a column, drawn as SVG or with block characters."""

from __future__ import annotations

import html
import math
from dataclasses import dataclass

import numpy as np

BINS = 32
PERCENTILES = (5, 25, 50, 75, 95, 99)
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 460, 150, 8, 22, 8
_UNITS = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Histogram:
    title: str
    unit: str
    count: int
    total: float
    low: float
    high: float
    mean: float
    percentiles: dict[int, float]
    edges: tuple[float, ...]
    counts: tuple[int, ...]
    mark: float | None = None  # a bound worth seeing, such as the length of a row
    adds_up: bool = True  # the sum means something

    @property
    def log_scale(self) -> bool:
        return len(self.edges) > 2 and not math.isclose(
            self.edges[1] - self.edges[0], self.edges[-1] - self.edges[-2], rel_tol=1e-6
        )

    def facts(self) -> dict[str, object]:
        return {
            "title": self.title,
            "unit": self.unit,
            "count": self.count,
            "total": self.total,
            "min": self.low,
            "max": self.high,
            "mean": self.mean,
            "percentiles": {str(share): value for share, value in self.percentiles.items()},
            "edges": list(self.edges),
            "counts": list(self.counts),
        }

    def summary(self) -> str:
        p = self.percentiles
        together = f", together {short(self.total)} {self.unit}" if self.adds_up else ""
        return (
            f"median {short(p[50])}, 95 % up to {short(p[95])}, 99 % up to {short(p[99])}, most {short(self.high)}"
            + together
        )


def histogram(
    title: str, unit: str, values: np.ndarray, mark: float | None = None, *, adds_up: bool = True
) -> Histogram | None:
    """None without values. Counts of few kinds get a bin each, wide ranges bins that grow."""
    if not len(values):
        return None
    low, high = float(values.min()), float(values.max())
    if high - low < BINS and np.issubdtype(values.dtype, np.integer):
        edges = np.arange(low, high + 2) - 0.5
    elif low > 0 and high / low > 50:
        edges = np.geomspace(low, high * (1 + 1e-9), BINS + 1)
    elif high > 2000 and low >= 0 and high > 20 * max(1.0, float(np.median(values))):
        edges = np.concatenate([[0.0], np.geomspace(1.0, high * (1 + 1e-9), BINS)])
    else:
        edges = np.linspace(low, high if high > low else low + 1, BINS + 1)
    counts, _ = np.histogram(values, bins=edges)
    found = np.percentile(values, PERCENTILES)
    return Histogram(
        title,
        unit,
        len(values),
        float(values.sum(dtype=np.float64)),
        low,
        high,
        float(values.mean(dtype=np.float64)),
        {share: float(value) for share, value in zip(PERCENTILES, found, strict=True)},
        tuple(float(edge) for edge in edges),
        tuple(int(count) for count in counts),
        mark,
        adds_up,
    )


def short(value: float) -> str:
    """1234567 -> 1.23M."""
    size = abs(value)
    for unit, letter in _UNITS:
        if size >= unit * (10 if letter == "k" else 1):
            return f"{value / unit:.3g}{letter}" if size < 1000 * unit else f"{value / unit:.0f}{letter}"
    return f"{value:,.0f}" if float(value).is_integer() or size >= 100 else f"{value:.3g}"


def svg(found: Histogram) -> str:
    """A figure. Bars are named by their range for whoever points at them."""
    most = max(found.counts) or 1
    wide = (WIDTH - 2 * LEFT) / len(found.counts)
    high = HEIGHT - TOP - BOTTOM
    parts = []
    for number, count in enumerate(found.counts):
        # A single sample in a hundred thousand still shows.
        tall = max(1.5, high * count / most) if count else 0.0
        name = f"{_range(found, number)}: {count:,}"
        parts.append(
            f'<rect class="bar" x="{LEFT + number * wide + 0.5:.1f}" y="{TOP + high - tall:.1f}" '
            f'width="{max(1.0, wide - 1):.1f}" height="{tall:.1f}"><title>{html.escape(name)}</title></rect>'
        )
    for share in () if _one_each(found) else (50, 95):
        parts.append(_line(found, found.percentiles[share], "share", f"{share} %"))
    if found.mark is not None and found.edges[0] <= found.mark <= found.edges[-1]:
        parts.append(_line(found, found.mark, "mark", short(found.mark)))
    for at, value in _labels(found):
        anchor = "start" if at == 0 else "end" if at == len(found.counts) else "middle"
        parts.append(
            f'<text x="{LEFT + at * wide:.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">{html.escape(value)}</text>'
        )
    title = html.escape(found.title)
    scale = ", bins grow" if found.log_scale else ""
    return (
        f"<figure><figcaption>{title}<span>{html.escape(found.unit)}{scale}</span></figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">{"".join(parts)}</svg>'
        f'<p class="soft">{html.escape(found.summary())}</p></figure>'
    )


def bars(found: Histogram, width: int = 48) -> str:
    """One line of block characters."""
    levels = " ▁▂▃▄▅▆▇█"
    step = max(1, math.ceil(len(found.counts) / width))
    counts = [sum(found.counts[at : at + step]) for at in range(0, len(found.counts), step)]
    most = max(counts) or 1
    return "".join(levels[0 if not c else max(1, round(8 * c / most))] for c in counts)


def _line(found: Histogram, value: float, style: str, text: str) -> str:
    edges = np.array(found.edges)
    at = int(np.clip(np.searchsorted(edges, value, side="right") - 1, 0, len(found.counts) - 1))
    inside = (value - edges[at]) / max(edges[at + 1] - edges[at], 1e-12)
    x = LEFT + (at + inside) * (WIDTH - 2 * LEFT) / len(found.counts)
    near_end = x > WIDTH - 60
    y = TOP + {"50 %": 8, "95 %": 20}.get(text, 32)  # one below the other: they may lie close
    return (
        f'<line class="{style}" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        f'<text class="{style}" x="{x + (-4 if near_end else 4):.1f}" y="{y}" '
        f'text-anchor="{"end" if near_end else "start"}">{html.escape(text)}</text>'
    )


def _labels(found: Histogram) -> list[tuple[float, str]]:
    """(place in bins, text): both ends and the middle; each value where a bin is one value and there is room."""
    bins = len(found.counts)
    if _one_each(found):
        every = max(1, math.ceil(bins / 12))
        return [(at + 0.5, short(found.edges[at] + 0.5)) for at in range(0, bins, every)]
    return [(at, short(found.edges[at])) for at in (0, bins // 2, bins)]


def _one_each(found: Histogram) -> bool:
    """Bins of one whole number each: their edges lie between numbers."""
    return math.isclose(found.edges[1] - found.edges[0], 1.0) and not found.edges[0].is_integer()


def _range(found: Histogram, number: int) -> str:
    low, high = found.edges[number], found.edges[number + 1]
    return short(low + 0.5) if _one_each(found) else f"{short(low)} to {short(high)}"
