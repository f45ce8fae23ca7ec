"""Files broken at random: each gives what its header promised, or an error that says so. Nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.toys import media_zoo
from tests.toys.fuzz import each_outcome

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
    yield from each_outcome("tests.toys.fuzz_media", start, stop, SECONDS + GRACE, (folder, seed), (SECONDS,))


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
    check(zoo, seed=1, count=80, batch=80)


@pytest.mark.slow
def test_ten_thousand_damaged_files(zoo: Path) -> None:
    seen = check(zoo, seed=2, count=10_000, batch=1000)
    assert max(row["peak_mib"] for row in seen) < 700
