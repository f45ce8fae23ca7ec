"""Records of a run: a broken line costs itself, an error loses nothing, a resume of a long run reads little."""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tessera
from tessera.core.batch import Batch
from tessera.core.callback import Callback, StepResult
from tessera.core.sample import BadSample
from tessera.runtime.files import JsonLines, last_step, read_jsonl, rows_from_end, truncate_after
from tessera.training.records import Ledger, Quarantine, read_ledger, read_masked
from tests.toys.chat_set import chat_recipe, write_chat_set


def quick_recipe(data: Path, out: Path, **train: Any) -> dict[str, Any]:
    """Without worker processes, whose start would take longer than the run."""
    recipe = chat_recipe(data, out, **train)
    recipe["data"]["workers"] = 0
    return recipe


GARBAGE = [b"{broken\n", b"\x00\x00\xff\xfe\n", b"[1, 2]\n", b'{"kind": "train"}\n', b"\n", b'{"step": "7"}\n']


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_set(tmp_path_factory.mktemp("chat"), samples=12)


def write_rows(path: Path, steps: range, broken: dict[int, bytes] | None = None) -> None:
    with path.open("wb") as file:
        for step in steps:
            file.write((broken or {}).get(step, b""))
            file.write(json.dumps({"step": step, "kind": "train", "text": "x" * (step * 37 % 300)}).encode() + b"\n")


def test_rows_from_the_end_are_those_from_the_beginning(tmp_path: Path) -> None:
    chance = random.Random(0)
    for trial in range(20):
        path = tmp_path / f"{trial}.jsonl"
        write_rows(path, range(1, chance.randint(2, 900)), {chance.randint(1, 50): chance.choice(GARBAGE[:3])})
        if trial % 2:
            with path.open("ab") as file:
                file.write(b'{"step": 7')  # torn by a kill
        rows = list(rows_from_end(path))
        assert [row for _, row in reversed(rows) if row is not None] == list(read_jsonl(path))
        assert rows[0][0] == path.stat().st_size
    assert list(rows_from_end(tmp_path / "none")) == []


@pytest.mark.parametrize("garbage", GARBAGE)
def test_a_broken_line_is_passed_over_where_the_end_is_cut_off(tmp_path: Path, garbage: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    write_rows(path, range(1, 41), {5: garbage, 30: garbage, 31: garbage, 40: garbage})
    truncate_after(path, 30)
    assert [row["step"] for row in read_jsonl(path) if isinstance(row.get("step"), int)] == list(range(1, 31))
    assert last_step(path) == 30
    record = JsonLines(path)
    record.write({"step": 31})
    record.close()
    assert last_step(path) == 31


def test_a_row_behind_a_torn_one_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "quarantine.jsonl"
    path.write_bytes(b'{"id": "a"}\n{"id": "b')
    record = JsonLines(path)
    record.write({"id": "c"})
    record.close()
    assert [row["id"] for row in read_jsonl(path)] == ["a", "c"]


def test_only_the_end_of_a_long_record_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    write_rows(path, range(1, 20001))
    parsed = 0

    def count(line: bytes) -> Any:
        nonlocal parsed
        parsed += 1
        return json.loads(line)

    monkeypatch.setattr("tessera.runtime.files.parse_row", count)
    truncate_after(path, 19990)
    assert parsed == 11
    assert last_step(path) == 19990


# ---------------------------------------------------------------------------------------------- in a run


def test_broken_lines_in_every_record_do_not_stop_a_resume(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tessera.train(quick_recipe(data, tmp_path, steps=4)).folder
    (folder / "quarantine.jsonl").write_bytes(b'nonsense\n{"reason": "no id"}\n')
    for path in (folder / "metrics.jsonl", folder / "ledger" / "rank-00000.jsonl"):
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join([lines[0], *GARBAGE, *lines[1:], b'{"step": 5, "torn']))
    run = tessera.resume(folder, {"train.steps": 6})
    assert sorted({row["step"] for row in run.metrics if row.get("kind") == "train" and "step" in row}) == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]
    assert list(read_ledger(folder)) == [1, 2, 3, 4, 5, 6]
    assert (folder / "report.html").is_file()


class Fail(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, trainer: Any) -> None:
        if trainer.step == self.step:
            raise RuntimeError("planted")


class Stop(Fail):
    def on_step_begin(self, trainer: Any) -> None:
        if trainer.step + 1 == self.step:
            trainer.request_stop("planted")


def steps_on_disk(folder: Path) -> list[int]:
    return [row["step"] for row in read_jsonl(folder / "metrics.jsonl") if row["kind"] == "train"]


def test_metrics_that_were_pending_survive_an_error(data: Path, tmp_path: Path) -> None:
    recipe = quick_recipe(data, tmp_path, steps=20) | {"log": {"every": 50}}
    with pytest.raises(RuntimeError, match="planted"):
        tessera.train(recipe, callbacks=[Fail(7)])
    assert steps_on_disk(tmp_path / "chat") == list(range(1, 8))


@pytest.mark.slow
def test_metrics_that_were_pending_survive_a_stop_and_come_once(data: Path, tmp_path: Path) -> None:
    recipe = quick_recipe(data, tmp_path, steps=9, eval_every=3) | {"log": {"every": 50}}
    run = tessera.train(recipe, callbacks=[Stop(5)])
    assert run.stopped == "planted"
    assert steps_on_disk(run.folder) == [1, 2, 3, 4, 5]
    assert "step_seconds" in run.metrics[-1]
    again = tessera.resume(run.folder)
    assert steps_on_disk(again.folder) == list(range(1, 10))
    assert [row["step"] for row in again.metrics] == sorted(row["step"] for row in again.metrics)


# ---------------------------------------------------------------------------------------------- the ledger


def result(step: int) -> StepResult:
    batch = Batch({}, {}, sample_ids=(f"sample-{step}", f"sample-{step + 1}"), rows=((step, 2),))
    numbers: Any = dict
    return StepResult(step, numbers, 0.1, [batch])


def trainer_at(folder: Path, step: int, rank: int = 0) -> Any:
    world = SimpleNamespace(rank=rank, is_main=rank == 0)
    return SimpleNamespace(config=SimpleNamespace(folder=folder), world=world, step=step)


def expected(steps: int) -> dict[int, list[tuple[int, list[str]]]]:
    return {step: [(step, [f"sample-{step}", f"sample-{step + 1}"])] for step in range(1, steps + 1)}


def record(folder: Path, begin: int, end: int, segment_bytes: int = 2000) -> None:
    ledger = Ledger(segment_bytes)
    trainer = trainer_at(folder, begin)
    ledger.on_start(trainer)
    for step in range(begin + 1, end + 1):
        ledger.on_step_end(trainer, result(step))
    ledger.on_end(trainer)


def test_a_long_ledger_is_kept_in_closed_segments(tmp_path: Path) -> None:
    record(tmp_path, 0, 500)
    assert read_ledger(tmp_path) == expected(500)
    files = sorted(path.name for path in (tmp_path / "ledger").iterdir())
    assert len(files) > 10
    assert files[0].startswith("rank-00000.0000000001-")
    open_file = tmp_path / "ledger" / "rank-00000.jsonl"
    assert not open_file.exists() or open_file.stat().st_size < 2200


@pytest.mark.parametrize("step", [0, 1, 250, 251, 499, 500])
def test_a_resume_cuts_the_ledger_at_any_step_and_rewrites_one_segment(tmp_path: Path, step: int) -> None:
    record(tmp_path, 0, 500)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "ledger").iterdir()}
    Ledger().on_start(trainer_at(tmp_path, step))
    assert read_ledger(tmp_path) == expected(step)
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "ledger").iterdir()}
    assert len([path for path in after if after[path] != before.get(path)]) <= 1
    record(tmp_path, step, 520)
    assert read_ledger(tmp_path) == expected(520)


def test_a_kill_between_compressing_and_removing_repeats_nothing(tmp_path: Path) -> None:
    record(tmp_path, 0, 10, segment_bytes=1 << 20)
    open_file = tmp_path / "ledger" / "rank-00000.jsonl"
    text = open_file.read_bytes()
    record(tmp_path, 10, 11, segment_bytes=1)  # everything is compressed now
    assert not open_file.exists()
    open_file.write_bytes(text + b'{"step": 12, "samples": [["late"]], "rows": [[[12, 1]]]}\n')
    assert list(read_ledger(tmp_path)) == [*range(1, 13)]
    assert {len(rows) for rows in read_ledger(tmp_path).values()} == {1}
    record(tmp_path, 11, 20)
    assert read_ledger(tmp_path) == expected(20)


def test_a_damaged_segment_costs_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    record(tmp_path, 0, 100)
    segment = sorted((tmp_path / "ledger").glob("*.gz"))[1]
    os.truncate(segment, segment.stat().st_size // 2)
    ledger = read_ledger(tmp_path)
    assert 50 < len(ledger) < 100
    assert "is damaged" in caplog.text
    record(tmp_path, 90, 110)
    assert max(read_ledger(tmp_path)) == 110


@pytest.mark.parametrize("damage", [b"", b"nonsense\n", b'{"step": 5}\n', b'{"step": 5, "samples": 7}\n'])
def test_a_ledger_that_lacks_a_step_says_so_when_it_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: bytes
) -> None:
    record(tmp_path, 0, 10, segment_bytes=1 << 20)
    assert list(read_ledger(tmp_path)) == list(range(1, 11))
    record(tmp_path, 10, 11)
    assert not caplog.messages
    path = tmp_path / "ledger" / "rank-00000.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:4], damage, *lines[5:]]))
    assert 5 not in read_ledger(tmp_path)
    assert len(caplog.messages) == (2 if damage else 1)
    assert "step 5" in caplog.messages[-1]


def test_a_step_that_one_rank_has_no_line_of_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for rank in (0, 1):
        ledger = Ledger()
        ledger.on_start(trainer_at(tmp_path, 0, rank))
        for step in range(1, 6):
            if rank or step != 3:
                ledger.on_step_end(trainer_at(tmp_path, step, rank), result(step))
        ledger.on_end(trainer_at(tmp_path, 5, rank))
    assert list(read_ledger(tmp_path)) == [1, 2, 3, 4, 5]
    assert ["step 3" in message for message in caplog.messages] == [True]


def test_the_ledger_and_the_quarantine_tell_masked_samples_and_their_step(tmp_path: Path) -> None:
    batch = Batch({}, sample_ids=("a", "b"), rows=((0, 2),), problems=(("b", "torn"), ("of the index", "too long")))
    numbers: Any = dict
    ledger, quarantine, trainer = Ledger(), Quarantine([("early", "empty")]), trainer_at(tmp_path, 0)
    for callback in (ledger, quarantine):
        callback.on_start(trainer)
        callback.on_step_end(trainer, StepResult(1, numbers, 0.1, [batch]))
        callback.on_step_end(trainer, StepResult(2, numbers, 0.1, [replace(batch, problems=())]))
        callback.on_end(trainer)
    assert read_masked(tmp_path) == {1: ["b"]}
    assert read_ledger(tmp_path) == {1: [(0, ["a", "b"])], 2: [(0, ["a", "b"])]}
    listed = {row["id"]: row.get("step") for row in read_jsonl(tmp_path / "quarantine.jsonl")}
    assert listed == {"early": None, "b": 1, "of the index": 1}


def test_the_main_rank_cuts_the_ledgers_of_ranks_that_are_gone(tmp_path: Path) -> None:
    for rank in range(3):
        ledger = Ledger(500)
        ledger.on_start(trainer_at(tmp_path, 0, rank))
        for step in range(1, 31):
            ledger.on_step_end(trainer_at(tmp_path, step, rank), result(step))
        ledger.on_end(trainer_at(tmp_path, 30, rank))
    Ledger().on_start(trainer_at(tmp_path, 12))
    assert list(read_ledger(tmp_path)) == list(range(1, 13))
    assert {len(rows) for rows in read_ledger(tmp_path).values()} == {3}


def test_quarantine_passes_over_a_broken_line(tmp_path: Path) -> None:
    (tmp_path / "quarantine.jsonl").write_bytes(b'{"id": "a", "reason": ""}\n\xff\xff\n')
    quarantine = Quarantine()
    quarantine.on_start(trainer_at(tmp_path, 0))
    quarantine.note(BadSample("a", "again"))
    quarantine.note(BadSample("b", "new"))
    assert [row["id"] for row in read_jsonl(tmp_path / "quarantine.jsonl")] == ["a", "b"]
