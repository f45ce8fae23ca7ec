"""Draw the curves of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tessera.observe.report.recorded import RecordedRun, smooth
from tessera.runtime import html

_FEW_POINTS = 40  # a held-out curve of up to this many points is drawn as dots


def charts_of(run: RecordedRun) -> list[str]:
    """Return the charts of the metrics that a run recorded."""
    charts = [
        _chart("Loss", [*_with_average(run, "loss"), _held(run.held_out("loss"))], log_scale=True),
        _chart("Gradient norm", _with_average(run, "grad_norm"), log_scale=True),
        _chart("Learning rate", [html.Series("learning rate", run.points("lr"))]),
    ]
    charts += _metric_charts(run)
    for rate in ("tokens_per_s", "samples_per_s"):
        title = f"{_title(rate.removesuffix('_per_s'))} per second"
        charts.append(_chart(title, [html.Series("per second", run.points(rate))], from_zero=True))
    speed, unit = ("mfu", "MFU") if run.points("mfu") else ("tflops", "TFLOP/s of each rank")
    charts.append(_chart(unit, [html.Series(unit, run.points(speed))], from_zero=True))
    memory = [
        html.Series("peak", run.points("peak_memory_gib")),
        html.Series("in use", run.points("memory_gib"), "held"),
    ]
    charts.append(_chart("Memory, GiB", memory, from_zero=True))
    charts.append(_chart("Seconds per step", [html.Series("seconds", run.points("step_seconds"))], from_zero=True))
    wait = [html.Series("share of the time", run.points("data_wait"))]
    charts.append(_chart("Waiting for data", wait, from_zero=True))
    charts.append(_chart("Work of the busiest rank over the mean", [html.Series("ratio", run.points("balance"))]))
    return [chart for chart in charts if chart]


def _metric_charts(run: RecordedRun) -> list[str]:
    """Return charts of the objective's metrics, and of metrics that only evaluations record."""
    names = run.metric_names()
    charts = [_chart(_title(name), [*_with_average(run, name), _held(run.held_out(name))]) for name in names]
    for name in run.held_out_names():
        if name not in ("loss", *names):
            charts.append(_chart(_HELD_OUT.get(name, f"Held-out {_words(name)}"), [_held(run.held_out(name))]))
    return charts


_HELD_OUT = {"exact_match": "Exact answers to held-out samples"}


def _chart(title: str, series: Sequence[html.Series], log_scale: bool = False, from_zero: bool = False) -> str:
    """Return a chart over steps; empty if there are no points. `log_scale` applies only if all values are positive."""
    values = [y for line in series for _, y in line.points if math.isfinite(y)]
    if not any(line.points for line in series):
        return ""
    scale = log_scale and all(y > 0 for y in values)
    from_zero = from_zero and min(values, default=0) >= 0
    return html.line_chart(f"{title} (logarithmic)" if scale else title, series, scale, from_zero)


def _with_average(run: RecordedRun, key: str) -> list[html.Series]:
    points = run.points(key)
    if len(points) < 3:
        return [html.Series("each step", points, dots=True)]
    each = "each step" if run.every == 1 else f"one step in {run.every:,}"
    return [html.Series(each, points, "raw"), html.Series("smoothed", smooth(points))]


def _held(points: list[html.Point]) -> html.Series:
    return html.Series("held-out", points, "held", dots=len(points) <= _FEW_POINTS)


def _words(name: str) -> str:
    return name.replace("_", " ")


def _title(name: str) -> str:
    words = _words(name)
    return words[:1].upper() + words[1:]
