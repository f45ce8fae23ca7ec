"""Histograms: bins and percentiles of values, drawn as an HTML chart or as a line of block characters."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tessera.runtime import html

BINS = 32
PERCENTILES = (5, 25, 50, 75, 95, 99)
_UNITS = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Histogram:
    title: str
    unit: str
    count: int
    total: float
    min: float
    max: float
    mean: float
    percentiles: dict[int, float]
    edges: tuple[float, ...]
    counts: tuple[int, ...]
    mark: float | None = None  # a value to mark in the chart, such as the row length
    adds_up: bool = True  # whether the sum of all values is meaningful

    @property
    def log_scale(self) -> bool:
        return len(self.edges) > 2 and not math.isclose(
            self.edges[1] - self.edges[0], self.edges[-1] - self.edges[-2], rel_tol=1e-6
        )

    def summary(self) -> str:
        p = self.percentiles
        together = f", together {short(self.total)} {self.unit}" if self.adds_up else ""
        return (
            f"median {short(p[50])}, 95 % up to {short(p[95])}, 99 % up to {short(p[99])}, most {short(self.max)}"
            + together
        )


def histogram(
    title: str, unit: str, values: np.ndarray, mark: float | None = None, *, adds_up: bool = True
) -> Histogram | None:
    """Return the histogram of values; None if there are none. A few integers get one bin each, wide ranges log bins."""
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
    percentiles = np.percentile(values, PERCENTILES)
    return Histogram(
        title,
        unit,
        len(values),
        float(values.sum(dtype=np.float64)),
        low,
        high,
        float(values.mean(dtype=np.float64)),
        {share: float(value) for share, value in zip(PERCENTILES, percentiles, strict=True)},
        tuple(float(edge) for edge in edges),
        tuple(int(count) for count in counts),
        mark,
        adds_up,
    )


def short(value: float) -> str:
    """Format a number with few characters: 1234567 as 1.23M."""
    size = abs(value)
    for unit, letter in _UNITS:
        if size >= unit * (10 if letter == "k" else 1):
            return f"{value / unit:.3g}{letter}" if size < 1000 * unit else f"{value / unit:.0f}{letter}"
    return f"{value:,.0f}" if float(value).is_integer() or size >= 100 else f"{value:.3g}"


def chart(data: Histogram) -> str:
    """Return the histogram as an HTML bar chart, with the range and the count of each bar as its tooltip."""
    edges = [short(edge) for edge in data.edges]
    bars = [(count, f"{edges[at]} to {edges[at + 1]}: {count:,}") for at, count in enumerate(data.counts)]
    lines = [(_position(data, data.percentiles[p]), "share", f"{p} %") for p in (50, 95)]
    if data.mark is not None and data.edges[0] <= data.mark <= data.edges[-1]:
        lines.append((_position(data, data.mark), "mark", short(data.mark)))
    unit = f"{data.unit}, bins grow" if data.log_scale else data.unit
    note = f'<p class="soft">{html.escape(data.summary())}</p>'
    labels = [(at, edges[at]) for at in (0, len(bars) // 2, len(bars))]
    return html.bar_chart(data.title, unit, bars, labels=labels, lines=lines, note=note)


def bars(data: Histogram) -> str:
    """Return the histogram as one line of at most 48 block characters."""
    levels = " ▁▂▃▄▅▆▇█"
    step = max(1, math.ceil(len(data.counts) / 48))
    counts = [sum(data.counts[at : at + step]) for at in range(0, len(data.counts), step)]
    most = max(counts) or 1
    return "".join(levels[0 if not c else max(1, round(8 * c / most))] for c in counts)


def _position(data: Histogram, value: float) -> float:
    """Return where a value is on the horizontal axis, as a fractional number of bars from the left."""
    edges = np.array(data.edges)
    at = int(np.clip(np.searchsorted(edges, value, side="right") - 1, 0, len(data.counts) - 1))
    return float(at + (value - edges[at]) / max(edges[at + 1] - edges[at], 1e-12))
