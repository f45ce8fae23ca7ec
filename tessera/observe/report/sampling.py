"""Read of a long `metrics.jsonl` what can be seen: a line of some thousand points, and every peak.

A run of a million steps has a record of hundreds of megabytes. Lines are passed over by their bytes, and only those
that are kept are read as JSON.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tessera.runtime.files import Row, check_regular, parse_row, read_metrics, step_of

MOST_ROWS = 10_000  # of steps; a chart has far fewer columns
_BEGINNING_BYTES = 1 << 16
_STEP = b'"kind": "train"'  # as records are written; a line in which it stands otherwise counts as a rare one
_LOSS = re.compile(rb'"loss": ([^,}\s]+)')


@dataclass(frozen=True)
class SampledMetrics:
    """Hold rows of a record: of steps one in `every`, all others, and those between with the highest losses."""

    rows: Sequence[Row]
    peaks: Sequence[Row] = ()
    every: int = 1


def sample_metrics(path: Path, most: int = MOST_ROWS) -> SampledMetrics:
    """Return the rows of a record, or of a long one about `most` rows of steps, at equal distances, and the last."""
    every = _distance(path, most)
    if every == 1:
        return SampledMetrics(read_metrics(path))
    rows: list[bytes] = []
    peaks: list[bytes] = []
    highest, at_peak, passed = -math.inf, b"", 0
    end = [b"", b""]  # of the steps behind the last that is kept; of two lines one may be broken
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            if _STEP not in line:
                rows.append(line)
                continue
            end, passed, loss = [end[1], line], passed + 1, _loss(line)
            if loss > highest:
                highest, at_peak = loss, line
            if passed == every:
                rows.append(line)
                if at_peak != line:
                    peaks.append(at_peak)
                highest, at_peak, passed, end = -math.inf, b"", 0, [b"", b""]
    return SampledMetrics([*_parsed(_few(rows, most)), *_parsed(end)[-1:]], _parsed([*peaks, at_peak]), every)


def _few(rows: list[bytes], most: int) -> list[bytes]:
    """Return the rows with few enough of those that are of no step: evaluations, which may be as many as steps."""
    rare = [number for number, line in enumerate(rows) if _STEP not in line]
    kept = {*rare[:: max(1, len(rare) // most)], *rare[-1:]}
    return rows if len(kept) == len(rare) else [line for at, line in enumerate(rows) if _STEP in line or at in kept]


def _distance(path: Path, most: int) -> int:
    """Return how many steps lie between two rows that are kept, by the size of the file and of its first lines."""
    if not path.exists():
        return 1
    size = check_regular(path).st_size
    with path.open("rb") as file:
        beginning = file.read(_BEGINNING_BYTES)
    lines = beginning.count(b"\n")
    return max(1, int(size / max(1, len(beginning)) * lines / most))


def _loss(line: bytes) -> float:
    """Return the loss of a line for comparison: one that is no number is the highest of all."""
    found = _LOSS.search(line)
    if found is None:
        return -math.inf
    try:
        loss = float(found[1])
    except ValueError:
        return math.inf
    return loss if loss == loss else math.inf


def _parsed(lines: Sequence[bytes]) -> list[Row]:
    found = [row for line in lines if line and (row := parse_row(line)) is not None]
    return [row for row in found if "kind" in row and step_of(row) is not None]
