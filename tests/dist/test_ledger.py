"""The ledger: whoever reads a packed, weighted mixture, and however often it is killed, the same rows at each step."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tessera.runtime.files import read_jsonl
from tessera.training.records import Row, read_ledger
from tessera.training.run import train
from tests.dist.spawn import run_ranks
from tests.dist.test_kill import finish, kill, start
from tests.toys.chat_set import chat_recipe, write_chat_set

STEPS, ROWS = 12, 4
Books = dict[int, list[Row]]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sets with pictures, one of which is drawn more often than its size says."""
    folder = tmp_path_factory.mktemp("sets")
    write_chat_set(folder, samples=30)
    write_chat_set(folder / "second", samples=11, seed=1)
    return folder


def recipe(data: Path, out: Path, workers: int = 0, **train: Any) -> dict[str, Any]:
    settings = chat_recipe(data, out, steps=STEPS, global_batch=ROWS, **train)
    settings["data"]["train"] = [
        {"path": str(data / "train.jsonl"), "weight": 1.0},
        {"path": str(data / "second" / "train.jsonl"), "weight": 1.5},
    ]
    settings["data"] |= {"eval": [], "workers": workers}
    settings["checkpoint"] = {"every": 0, "at_end": False}
    return settings


def run(rank: int, world: int, settings: dict[str, Any]) -> None:
    train(settings)


def books(out: Path) -> Books:
    return read_ledger(out / "chat")


@pytest.fixture(scope="module")
def expected(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Books:
    out = tmp_path_factory.mktemp("one")
    run(0, 1, recipe(data, out))
    return books(out)


def test_one_rank_reads_row_after_row(expected: Books) -> None:
    assert [[row for row, _ in rows] for rows in expected.values()] == [
        list(range(step * ROWS, (step + 1) * ROWS)) for step in range(STEPS)
    ]
    assert any(len(ids) > 1 for rows in expected.values() for _, ids in rows)  # packed
    drawn = Counter(id for rows in expected.values() for _, ids in rows for id in ids)
    second = sum(count for id, count in drawn.items() if id.endswith("~2"))  # both sets number their samples from 0
    assert sum(drawn.values()) > 2 * 41
    assert second / sum(drawn.values()) == pytest.approx(0.6, abs=0.1)
    assert min(drawn[f"sample-{n}~2"] for n in range(11)) >= 3  # up-sampled, each about as often
    assert max(drawn[f"sample-{n}~2"] for n in range(11)) <= 8


LATER = [pytest.param(*row, marks=pytest.mark.slow) for row in ((2, 2, 1), (4, 1, 1), (2, 0, 2))]


@pytest.mark.parametrize(("ranks", "workers", "micro"), LATER)
def test_any_layout_keeps_the_same_books(
    ranks: int, workers: int, micro: int, data: Path, tmp_path: Path, expected: Books
) -> None:
    run_ranks(run, ranks, recipe(data, tmp_path, workers, micro_batch=micro))
    ledgers = books(tmp_path)
    assert ledgers == expected
    assert len(list((tmp_path / "chat" / "ledger").iterdir())) == ranks
    metrics = [row for row in read_jsonl(tmp_path / "chat" / "metrics.jsonl") if "step_seconds" in row]
    assert all(1.0 <= row["balance"] < ranks for row in metrics)


@pytest.mark.slow  # test_kill and test_trainer_layouts have a kill and another number of ranks apart
def test_killed_and_resumed_on_another_number_of_ranks(data: Path, tmp_path: Path, expected: Books) -> None:
    settings = recipe(data, tmp_path, workers=1) | {"checkpoint": {"every": 1, "keep": 2}}
    processes = start(2, tmp_path, settings)
    wait_for(tmp_path / "chat" / "checkpoints", 4)
    assert kill(processes), "the run should not have ended by itself"
    finish(start(1, tmp_path, settings))
    assert books(tmp_path) == expected
    assert len(list((tmp_path / "chat" / "ledger").iterdir())) == 2


def wait_for(checkpoints: Path, step: int, patience: float = 90) -> None:
    deadline = time.monotonic() + patience
    while not any(int(path.name[5:]) >= step for path in checkpoints.glob("step-????????")):
        assert time.monotonic() < deadline, f"no checkpoint of step {step}"
        time.sleep(0.01)
