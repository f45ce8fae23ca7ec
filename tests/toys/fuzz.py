"""Programs that read broken files in a process of their own, and what became of each file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def each_outcome(
    program: str, start: int, stop: int, grace: float, before: Sequence[object] = (), behind: Sequence[object] = ()
) -> Iterator[dict[str, Any]]:
    """Run `python -m program *before START STOP *behind`, which prints a JSON object with a "number" before each file
    and one with an "outcome" after it. A process that dies or stands still is one more outcome; another goes on behind
    it. `grace`: seconds beyond half a second for each file."""
    while start < stop:
        child = subprocess.Popen(
            [sys.executable, "-m", program, *map(str, (*before, start, stop, *behind))],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            told, _ = child.communicate(timeout=(stop - start) * 0.5 + grace)
        except subprocess.TimeoutExpired:
            child.kill()
            told, _ = child.communicate()
        lines = [json.loads(line) for line in told.splitlines() if line.endswith("}")]
        files = [line for line in lines if "number" in line]
        results = [line for line in lines if "outcome" in line]
        yield from ({**file, **result} for file, result in zip(files, results, strict=False))
        if len(files) == len(results) and child.returncode == 0:
            return
        assert files, f"the reader did not start (exit {child.returncode})"
        if len(files) > len(results):
            yield {**files[-1], "outcome": f"died: {child.returncode}", "seconds": 0.0, "peak_mib": 0}
        start = files[-1]["number"] + 1
