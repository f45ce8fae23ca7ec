"""Read the records of a run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tessera.config.reader import read_mapping
from tessera.config.run_paths import find_file, no_run
from tessera.observe.report.history import RunSession, read_sessions
from tessera.runtime import html
from tessera.runtime.files import read_jsonl, step_of

METRICS = "metrics.jsonl"
MOST_ROWS = 10_000  # whenever more than twice as many step rows are in memory, every second one is dropped
# Keys of step rows in metrics.jsonl that every objective writes.
_COMMON = {"kind", "step", "epoch", "loss", "grad_norm", "lr", "skipped", "loss_scale", "step_seconds", "data_wait"}
_COMMON |= {"memory_gib", "peak_memory_gib", "balance", "tflops", "mfu"}


@dataclass(frozen=True)
class RecordedRun:
    """Hold the records of a run: configuration, metrics, answers and sessions."""

    folder: Path
    config: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    answers: Sequence[Mapping[str, Any]]
    sessions: Sequence[RunSession]
    every: int = 1  # steps between two rows: above 1 if rows of a long run were dropped

    @property
    def name(self) -> str:
        return str(self.config.get("name") or self.folder.name)

    @cached_property
    def train_rows(self) -> list[Mapping[str, Any]]:
        return [row for row in self.rows if row["kind"] == "train"]

    def points(self, key: str) -> list[html.Point]:
        """Return the values of a training metric, such as `loss`, as (step, value)."""
        return [(row["step"], row[key]) for row in self.train_rows if _is_number(row.get(key))]

    def held_out(self, key: str) -> list[html.Point]:
        """Return the values of a held-out metric as (step, value). `key`: its name without `eval_`, such as `loss`."""
        name = f"eval_{key}"
        return [(row["step"], row[name]) for row in self.rows if _is_number(row.get(name))]

    def metric_names(self) -> list[str]:
        """Return the names of the objective's metrics in the training steps, such as `margin`."""
        names = dict.fromkeys(name for row in self.train_rows for name in row)
        return [name for name in names if name not in _COMMON and not name.endswith("_per_s") and self.points(name)]

    def held_out_names(self) -> list[str]:
        names = dict.fromkeys(name for row in self.rows for name in row if name.startswith("eval_"))
        return [name.removeprefix("eval_") for name in names]

    def section(self, name: str) -> Mapping[str, Any]:
        section = self.config.get(name)
        return section if isinstance(section, dict) else {}


def read_run(folder: str | Path) -> RecordedRun:
    """Read the records of a run, which may still be running. Raise if the folder has no `metrics.jsonl`."""
    folder = find_file(Path(folder), METRICS).parent
    if not (folder / METRICS).is_file():
        begun = "; a run that has just begun has the file after its first steps"
        raise no_run(folder, METRICS, f"pass a run folder of `tessera train`{begun if folder.is_dir() else ''}")
    rows, every = _read_metrics(folder / METRICS)
    return RecordedRun(
        folder,
        read_mapping(folder / "config.yaml"),
        rows,
        list(_answers(folder)),
        read_sessions(folder),
        every,
    )


def smooth(points: Sequence[html.Point]) -> list[html.Point]:
    """Return an exponential moving average whose window is a thirtieth of the points, but two to ten points."""
    weight = 1 - 1 / min(10.0, max(2.0, len(points) / 30))
    out: list[html.Point] = []
    total = norm = 0.0  # the average begins at zero; division by the sum of weights, `norm`, removes this bias
    for x, y in points:
        if math.isfinite(y):
            total, norm = weight * total + (1 - weight) * y, weight * norm + (1 - weight)
            out.append((x, total / norm))
    return out


def _answers(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the answers of `tessera eval`, or if there are none, those of the run's last evaluation in training."""
    evaluated = folder / "answers.jsonl"
    files = ((re.fullmatch(r"answers-step-(\d{1,18})", path.stem), path) for path in folder.glob("answers-*.jsonl"))
    by_step = sorted((int(name[1]), path) for name, path in files if name is not None)
    for row in read_jsonl(evaluated if evaluated.exists() or not by_step else by_step[-1][1]):
        images = row.get("images")
        yield {
            **{key: str(row.get(key, "")) for key in ("id", "group", "question", "expected", "answer")},
            "correct": bool(row.get("correct")),
            "images": [str(path) for path in images] if isinstance(images, list) else [],
            "copies": [_file(copy) for copy in copies] if isinstance(copies := row.get("shown"), list) else [],
            "sizes": [image_size(copy) for copy in copies] if isinstance(copies, list) else [],
            "regions": [region for region in regions if isinstance(region, dict)]
            if isinstance(regions := row.get("regions"), list)
            else [],
        }


def _file(copy: object) -> str | None:
    """Return the file name of an image's copy in the run folder; None if the run stored no copy."""
    file = copy.get("file") if isinstance(copy, dict) else None
    return file if isinstance(file, str) else None


def image_size(copy: object) -> tuple[int, int] | None:
    """Return width and height of the image that a copy was made of; None if they are unknown."""
    sides = [copy.get(name) for name in ("width", "height")] if isinstance(copy, dict) else []
    good = [side for side in sides if type(side) is int and 0 < side < 1 << 31]
    return (good[0], good[1]) if len(good) == 2 else None


def _read_metrics(path: Path) -> tuple[list[Mapping[str, Any]], int]:
    """Return (rows of metrics.jsonl, n). Of a long run, only every n-th step row is returned; n is 1 for other runs."""
    steps: list[Mapping[str, Any]] = []
    others: list[Mapping[str, Any]] = []
    every, count, last = 1, 0, None
    for row in read_jsonl(path):
        if "kind" not in row or step_of(row) is None:
            continue
        if row["kind"] != "train":
            others.append(row)
            continue
        count, last = count + 1, row
        if count % every == 0:
            steps.append(row)
        if len(steps) > 2 * MOST_ROWS:
            steps, every = steps[1::2], 2 * every
    if last is not None and steps[-1:] != [last]:
        steps.append(last)
    thin = others[:: max(1, len(others) // MOST_ROWS)]
    return sorted([*steps, *thin], key=lambda row: row["step"]), every


def _is_number(value: object) -> bool:
    """Return whether a value can be drawn: a float, or an integer that a float can represent."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value.bit_length() < 1000
    return isinstance(value, float)
