"""Read what a run recorded, for those who draw it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tessera.config.reader import read_mapping
from tessera.config.run_paths import no_run
from tessera.observe.report.history import RunSession, read_sessions
from tessera.observe.report.sampling import sample_metrics
from tessera.runtime import html
from tessera.runtime.files import read_jsonl

METRICS = "metrics.jsonl"
# What rows of steps hold besides metrics of the objective.
_COMMON = {"kind", "step", "epoch", "loss", "grad_norm", "lr", "skipped", "loss_scale", "step_seconds", "data_wait"}
_COMMON |= {"memory_gib", "peak_memory_gib", "balance", "tflops", "mfu"}


@dataclass(frozen=True)
class RecordedRun:
    """Hold the records of one run as they were when it was read."""

    folder: Path
    config: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    answers: Sequence[Mapping[str, Any]]
    sessions: Sequence[RunSession]
    peaks: Sequence[Mapping[str, Any]] = ()  # steps of a long run with high losses that are not among `rows`
    every: int = 1  # steps between two of `rows`

    @property
    def name(self) -> str:
        return str(self.config.get("name") or self.folder.name)

    @property
    def running(self) -> bool:
        return bool(self.sessions) and self.sessions[-1].how == "running"

    @cached_property
    def train_rows(self) -> list[Mapping[str, Any]]:
        return [row for row in self.rows if row["kind"] == "train"]

    def points(self, key: str) -> list[html.Point]:
        """Return a number of the steps by step."""
        return [(row["step"], row[key]) for row in self.train_rows if _is_number(row.get(key))]

    def with_peaks(self, key: str) -> list[html.Point]:
        """Return the same for a line of each step, with the highest losses of a long run among them."""
        found = self.points(key)
        peaks = [(row["step"], row[key]) for row in self.peaks if row["kind"] == "train" and _is_number(row.get(key))]
        return sorted([*found, *peaks], key=lambda point: point[0]) if peaks else found

    def held_out(self, key: str) -> list[html.Point]:
        """Return a number of evaluations by step: `loss` is `eval_loss` in the record."""
        name = f"eval_{key}"
        return [(row["step"], row[name]) for row in self.rows if _is_number(row.get(name))]

    def metric_names(self) -> list[str]:
        """Return the metrics of the objective that steps have, such as `margin`."""
        names = dict.fromkeys(name for row in self.train_rows for name in row)
        return [name for name in names if name not in _COMMON and not name.endswith("_per_s") and self.points(name)]

    def held_out_names(self) -> list[str]:
        names = dict.fromkeys(name for row in self.rows for name in row if name.startswith("eval_"))
        return [name.removeprefix("eval_") for name in names]

    def section(self, name: str) -> Mapping[str, Any]:
        found = self.config.get(name)
        return found if isinstance(found, dict) else {}


def read_run(folder: str | Path) -> RecordedRun:
    """Read a run, also one that is still at work. Raise where the folder is none."""
    folder = Path(folder)
    if not (folder / METRICS).is_file():
        begun = "; a run that has just begun has the file after its first steps"
        raise no_run(folder, METRICS, f"name the folder that `tessera train` made{begun if folder.is_dir() else ''}")
    metrics = sample_metrics(folder / METRICS)
    return RecordedRun(
        folder,
        read_mapping(folder / "config.yaml"),
        metrics.rows,
        list(_answers(folder)),
        read_sessions(folder),
        metrics.peaks,
        metrics.every,
    )


def smooth(points: Sequence[html.Point]) -> list[html.Point]:
    """Return the exponential average over about a thirtieth of the points, and ten at most: a longer one would lag."""
    weight = 1 - 1 / min(10.0, max(2.0, len(points) / 30))
    out: list[html.Point] = []
    total = norm = 0.0  # dividing by the norm keeps the start from being pulled towards zero
    for x, y in points:
        if math.isfinite(y):
            total, norm = weight * total + (1 - weight) * y, weight * norm + (1 - weight)
            out.append((x, total / norm))
    return out


def _answers(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of the evaluation of the whole run, or of the last evaluation during the run."""
    whole = folder / "answers.jsonl"
    found = (
        (re.fullmatch(r"answers-step-(\d{1,18})", path.stem), path) for path in folder.glob("answers-step-*.jsonl")
    )
    of_steps = sorted((int(name[1]), path) for name, path in found if name is not None)
    for row in read_jsonl(whole if whole.exists() or not of_steps else of_steps[-1][1]):
        images = row.get("images")
        yield {
            **{key: str(row.get(key, "")) for key in ("id", "group", "question", "expected", "answer")},
            "correct": bool(row.get("correct")),
            "images": [str(one) for one in images] if isinstance(images, list) else [],
            "shown": [_shown_size(one) for one in shown] if isinstance(shown := row.get("shown"), list) else [],
        }


def _shown_size(copy: object) -> tuple[str, tuple[int, int]] | None:
    """Return the file of an image's copy in the run, and the size that the image had; None if the record has none."""
    if not isinstance(copy, dict) or not isinstance(file := copy.get("file"), str):
        return None
    width, height = copy.get("width"), copy.get("height")
    sizes = [size for size in (width, height) if type(size) is int and 0 < size < 1 << 20]
    return (file, (sizes[0], sizes[1])) if len(sizes) == 2 else None


def _is_number(value: object) -> bool:
    """Return whether a value of a record can be drawn; a whole number too long for a float cannot."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value.bit_length() < 1000
    return isinstance(value, float)
