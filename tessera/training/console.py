"""Write the line of a step: its fields in order, plain for logs and styled for terminals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tessera.runtime import log

WAITS = 0.05  # the line shows the share of time spent waiting for data if it is at least this
UNEVEN = 1.1  # the line shows the ratio of the busiest rank's work to the mean if it is at least this
METRICS = 2  # maximum number of the task's metrics on the line; losses are always shown
_UNITS = {"tokens": "tok"}

Field = tuple[str, str]  # name and value; the name may be empty


def step_fields(row: Mapping[str, Any], steps: int, metrics: Sequence[str] = ()) -> list[Field]:
    """Return the fields of a step's line.

    `row`: values of the step as in `metrics.jsonl`, with `loss` and metrics averaged since the last line. `metrics`:
    names of the task's metrics besides its loss.
    """
    speed, remaining = _speed(row), (steps - row["step"]) * row["step_seconds"]
    epoch, waits, uneven = row.get("epoch"), row.get("data_wait", 0.0), row.get("balance", 1.0)
    skipped = row.get("skipped_steps", 0)
    fields: list[Field | None] = [
        ("step", f"{row['step']:>{len(str(steps))}}/{steps}"),
        None if epoch is None else ("epoch", f"{epoch:.2f}" if epoch < 1 else f"{epoch:.1f}"),
        ("loss", f"{row['loss']:.4f}" if 1e-3 <= abs(row["loss"]) < 1000 else f"{row['loss']:.3g}"),
        *((name, f"{row[name]:.3g}") for name in _main_metrics(metrics)),
        ("lr", f"{row['lr']:.1e}".replace("e-0", "e-")),
        ("grad", f"{row['grad_norm']:.2g}"),
        ("skipped", str(skipped)) if skipped else None,
        ("wait", f"{waits:.0%}") if waits >= WAITS else None,
        ("balance", f"{uneven:.2f}") if uneven >= UNEVEN else None,
        None if speed is None else ("", speed),
        ("mfu", f"{row['mfu']:.0%}") if "mfu" in row else None,
        ("", f"{_brief(row['peak_memory_gib'])} GiB"),
        ("eta", clock(remaining)) if row["step"] > 1 else None,  # the first step is slow: it fills caches and compiles
    ]
    return [field for field in fields if field is not None]


def _main_metrics(metrics: Sequence[str]) -> Sequence[str]:
    """Return the metrics of the line: every loss of a task with several, then others, up to `METRICS` in all."""
    losses = [name for name in metrics if name.endswith("_loss")]
    others = [name for name in metrics if name not in losses]
    return [*losses, *others[: max(METRICS - len(losses), 0)]]


def plain(fields: Sequence[Field]) -> str:
    return "  ".join(f"{name} {value}" if name else value for name, value in fields)


def styled(fields: Sequence[Field]) -> str:
    """Return the line with the names dimmed and the loss in bold, for a terminal."""
    words = []
    for name, value in fields:
        text = log.style(value, "bold") if name == "loss" else value
        words.append(f"{log.style(name, 'dim')} {text}" if name else text)
    return "  ".join(words)


def mean_of(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Return the mean of each metric over steps with an applied update, and the number of skipped steps.

    Values that are not finite are left out. If there are no others, return the last value instead of a mean.
    """
    applied = [row for row in rows if not row.get("skipped")]
    means: dict[str, Any] = {}
    for name in names:
        values = [row[name] for row in applied if name in row and math.isfinite(row[name])]
        means[name] = sum(values) / len(values) if values else rows[-1][name]
    return {**means, "skipped_steps": len(rows) - len(applied)}


def clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24}d{hours % 24:02d}h"
    if hours:
        return f"{hours}h{minutes:02d}"
    return f"{minutes}m{seconds:02d}" if minutes else f"{seconds}s"


def _speed(row: Mapping[str, Any]) -> str | None:
    """Return the speed in tokens per second; if batches do not count tokens, in samples or another unit."""
    speeds = {key.removesuffix("_per_s"): value for key, value in row.items() if key.endswith("_per_s") and value}
    name = next((name for name in ("tokens", "samples", *speeds) if name in speeds), None)
    return None if name is None else f"{_brief(speeds[name])} {_UNITS.get(name, name)}/s"


def _brief(value: float) -> str:
    for unit in ("", "k", "M", "G"):
        if value < 999.5 or unit == "G":
            break
        value /= 1000
    return f"{value:.0f}{unit}" if value >= 9.95 and (value >= 99.5 or not unit) else f"{value:.2g}{unit}"
