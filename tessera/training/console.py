"""Write the line of a step, and show a bar with step and loss on a terminal."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tessera.core.callback import TrainerHandle
from tessera.runtime import log

if TYPE_CHECKING:
    from rich.progress import Progress

WIDTH = 100  # columns of a line, for terminals and logs
WAITS = 0.05  # a share of the time spent in waiting for data that is worth a word
UNEVEN = 1.1  # so is work of the busiest rank over the mean
_UNITS = {"tokens": "tok"}
_WORDS = {
    "accuracy": "acc",
    "reward": "rew",
    "rejected": "rej",
    "error": "err",
    "language": "lm",
    "at": "",
    "noise": "",
}

Field = tuple[str, str]  # a name, which may be empty, and a value


def step_fields(row: Mapping[str, Any], steps: int, metrics: Sequence[str] = ()) -> list[Field]:
    """Return the fields of a step's line, as many as fit into `WIDTH` columns; metrics.jsonl has all of them.

    `row`: numbers of the step, with `loss` and metrics averaged since the last line. `metrics`: names of the task's
    metrics besides its loss.
    """
    speed, remaining = _speed(row), (steps - row["step"]) * row["step_seconds"]
    epoch, waits, uneven = row.get("epoch"), row.get("data_wait", 0.0), row.get("balance", 1.0)
    skipped = row.get("skipped_steps", 0)
    # Each with a rank: where a line is too long, those of a high rank go first.
    ranked: list[tuple[int, Field] | None] = [
        (0, ("step", f"{row['step']:>{len(str(steps))}}/{steps}")),
        None if epoch is None else (4, ("epoch", f"{epoch:.2f}" if epoch < 1 else f"{epoch:.1f}")),
        (0, ("loss", _loss(row["loss"]))),
        *((_METRIC_RANKS[min(at, 3)], (_brief_name(name), f"{row[name]:.3g}")) for at, name in enumerate(metrics)),
        (9, ("lr", f"{row['lr']:.1e}".replace("e-0", "e-"))),
        (5, ("grad", f"{row['grad_norm']:.2g}")),
        (1, ("skipped", str(skipped))) if skipped else None,
        (6, ("wait", f"{waits:.0%}")) if waits >= WAITS else None,
        (10, ("balance", f"{uneven:.2f}")) if uneven >= UNEVEN else None,
        None if speed is None else (3, ("", speed)),
        (7, ("mfu", f"{row['mfu']:.0%}")) if "mfu" in row else None,
        (8, ("", f"{_two_digits(row['peak_memory_gib'])} GiB")),
        (2, ("eta", clock(remaining))) if row["step"] > 1 else None,  # the first step warms caches and compiles
    ]
    entries = [entry for entry in ranked if entry is not None]
    while len(plain([field for _, field in entries])) > WIDTH and len(entries) > 2:
        most = max(rank for rank, _ in entries)
        entries.pop(max(at for at, (rank, _) in enumerate(entries) if rank == most))
    return [field for _, field in entries]


_METRIC_RANKS = (1, 2, 8, 11)  # of the first, second and third metric, and of all others


def _brief_name(name: str) -> str:
    words = [_WORDS.get(word, word) for word in name.split("_")]
    return "_".join(word for word in words if word) or name


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
    """Return the means of some numbers over steps whose updates were applied, and how many were not."""
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


def _loss(value: float) -> str:
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1000 else f"{value:.3g}"


def _two_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def _speed(row: Mapping[str, Any]) -> str | None:
    """Return the speed in tokens, or in another unit that is counted."""
    speeds = {key.removesuffix("_per_s"): value for key, value in row.items() if key.endswith("_per_s") and value}
    name = next((name for name in ("tokens", "samples", *speeds) if name in speeds), None)
    return None if name is None else f"{_brief(speeds[name])} {_UNITS.get(name, name)}/s"


def _brief(value: float) -> str:
    for unit in ("", "k", "M", "G"):
        if value < 999.5 or unit == "G":
            break
        value /= 1000
    return f"{value:.0f}{unit}" if value >= 99.5 else f"{value:.2g}{unit}"


class StepBar:
    """Show step, loss and the time left on a terminal, below the lines of the run."""

    def __init__(self, trainer: TrainerHandle) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar: Progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("step"),
            MofNCompleteColumn(),
            TextColumn("{task.fields[doing]}"),
            TimeRemainingColumn(compact=True),
            console=Console(stderr=True),
            transient=True,
            expand=True,
        )
        self._loss, self._phase = "", ""
        name = trainer.config.name
        self._task = self._bar.add_task(name, total=trainer.length.steps, completed=trainer.step, doing="")
        self._bar.start()

    @staticmethod
    def on_terminal(trainer: TrainerHandle) -> StepBar | None:
        """Return a bar on a terminal; None where lines go to a log."""
        return StepBar(trainer) if log.is_terminal(sys.stderr) else None

    def step(self, step: int, loss: float | None) -> None:
        """Show that a step is done. `loss`: of the last step whose numbers are there."""
        if loss is not None:
            self._loss = f"loss {_loss(loss)}"
        self._bar.update(self._task, completed=step, doing=self._loss)

    def doing(self, words: str) -> None:
        """Show the phase of the run between two steps."""
        self._bar.update(self._task, doing=words or self._loss)

    def stop(self) -> None:
        self._bar.stop()
