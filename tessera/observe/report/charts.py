"""Draw the curves of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tessera.observe.report.recorded import RecordedRun, smooth
from tessera.runtime import html

_DRAWN_RATES = ("tokens_per_s", "samples_per_s")
_FEW_POINTS = 40  # up to this many are drawn as dots


def charts_of(run: RecordedRun) -> list[str]:
    """Return the charts of a run. A number that was not recorded has no chart."""
    charts = [
        _chart("Loss", [*_with_average(run, "loss"), _held(run.held_out("loss"))], log_scale=True),
        _chart("Gradient norm", _with_average(run, "grad_norm"), log_scale=True),
        _chart("Learning rate", [html.Series("learning rate", run.points("lr"))]),
    ]
    charts += _metric_charts(run)
    for rate in _rates(run):
        charts.append(_chart(_rate_title(rate), [html.Series("per second", run.points(rate))], from_zero=True))
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


def _run_style(number: int) -> str:
    return f"run-{number % html.RUN_COLORS}"


def _metric_charts(run: RecordedRun) -> list[str]:
    """Return charts of the objective's metrics. Metrics with the same first word, as `reward_chosen`, share a chart."""
    groups: dict[str, list[str]] = {}
    for name in run.metric_names():
        groups.setdefault(name.split("_")[0], []).append(name)
    charts = []
    for first, names in groups.items():
        if len(names) == 1:
            series = [*_with_average(run, names[0]), _held(run.held_out(names[0]))]
            charts.append(_chart(_title(names[0]), series))
            continue
        lines = [
            html.Series(_words(name).removeprefix(f"{first} "), smooth(run.points(name)), _run_style(number))
            for number, name in enumerate(names)
        ]
        held = [
            html.Series(f"held-out {_words(name).removeprefix(f'{first} ')}", run.held_out(name), _run_style(at), True)
            for at, name in enumerate(names)
        ]
        charts.append(_chart(f"{_title(first)}, smoothed", [*lines, *held]))
    drawn = {"loss", *run.metric_names()}
    for name in run.held_out_names():
        if name not in drawn:
            charts.append(_chart(_HELD_OUT.get(name, f"Held-out {_words(name)}"), [_held(run.held_out(name))]))
    return charts


_HELD_OUT = {"exact_match": "Exact answers to held-out samples"}


def _chart(title: str, series: Sequence[html.Series], log_scale: bool = False, from_zero: bool = False) -> str:
    """Return a chart over steps, or nothing if there is no number. A logarithmic one needs positive numbers."""
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


def _rates(run: RecordedRun) -> list[str]:
    """Return the rates to draw. The other rates are among the figures of the page."""
    names = dict.fromkeys(name for row in run.train_rows for name in row if name.endswith("_per_s"))
    moving = [name for name in names if any(y for _, y in run.points(name))]
    return [name for name in moving if name in _DRAWN_RATES] or moving[:2]


def _rate_title(rate: str) -> str:
    return f"{_title(rate.removesuffix('_per_s'))} per second"


def _words(name: str) -> str:
    return name.replace("_", " ")


def _title(name: str) -> str:
    words = _words(name)
    return words[:1].upper() + words[1:]
