"""Files broken at random: each gives what its header promised, or an error that says so. Nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.toys import media_zoo

ROOT = Path(__file__).parents[2]
SECONDS = 10.0  # for one file
GRACE = 20.0  # more for what does not look at the clock


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("av")
    folder = tmp_path_factory.mktemp("zoo")
    for name, data in {**media_zoo.pictures(), **media_zoo.clips(8), **media_zoo.sounds(0.3)}.items():
        (folder / name).write_bytes(data)
    return folder


def run(folder: Path, seed: int, start: int, stop: int) -> Iterator[dict[str, Any]]:
    """What became of each file. A process that dies or stands still is one more outcome; another goes on behind it."""
    while start < stop:
        words = [str(word) for word in (folder, seed, start, stop, SECONDS)]
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.toys.fuzz_media", *words],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            told, _ = child.communicate(timeout=(stop - start) * 0.5 + SECONDS + GRACE)
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


def check(folder: Path, seed: int, count: int, batch: int) -> list[dict[str, Any]]:
    seen = [row for start in range(0, count, batch) for row in run(folder, seed, start, min(count, start + batch))]
    kinds = Counter(row["outcome"].split(":")[0] for row in seen)
    bad = [row for row in seen if row["outcome"].split(":")[0] not in ("pixels", "refused")]
    assert not bad, f"{kinds}; the first: {bad[:5]}"
    assert max(row["seconds"] for row in seen) < SECONDS + 2
    assert {row["number"] for row in seen} == set(range(count))
    assert kinds["pixels"] > count // 10, kinds  # small damage leaves many files readable
    assert kinds["refused"] > count // 10, kinds
    return seen


def test_damaged_files_are_read_or_refused(zoo: Path) -> None:
    check(zoo, seed=1, count=300, batch=300)


@pytest.mark.slow
def test_ten_thousand_damaged_files(zoo: Path) -> None:
    seen = check(zoo, seed=2, count=10_000, batch=1000)
    assert max(row["peak_mib"] for row in seen) < 700
