"""The list of samples that could not be used, written by several ranks, and when there are too many of them."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tessera.config.reader import build
from tessera.config.run_config import DataSection, SourceSection
from tessera.core.batch import Batch
from tessera.core.callback import StepResult
from tessera.core.sample import BadSample
from tessera.data.bad_share import check_measured
from tessera.errors import TesseraError
from tessera.runtime.files import read_jsonl
from tessera.training.records import Quarantine, check_read
from tests.errors import raises


def rank(folder: Path, main: bool) -> Any:
    return SimpleNamespace(config=SimpleNamespace(folder=folder), world=SimpleNamespace(is_main=main, size=1), step=0)


def test_ranks_list_a_sample_once_and_count_what_all_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    header = BadSample("a", "from its header", "media.unreadable-file")
    first, other = Quarantine([header], in_all=4), Quarantine([header], in_all=4)
    main, second = rank(tmp_path, True), rank(tmp_path, False)
    first.on_start(main)
    other.on_start(second)
    other.note(BadSample("b", "truncated", "media.damaged-file"))
    first.note(BadSample("b", "truncated", "media.damaged-file"))
    other.note(BadSample("c", "truncated, too", "media.damaged-file"))
    other.on_end(second)
    first.on_end(main)
    assert [row["id"] for row in read_jsonl(tmp_path / "quarantine.jsonl")] == ["a", "b", "c"]
    assert "skipped samples: 6 (2 media.damaged-file, 1 media.unreadable-file)" in caplog.text
    assert "lists 3 of them" in caplog.text


@pytest.mark.parametrize(
    ("bad", "total", "refused"),
    [(1, 2, False), (1, 10, False), (2, 40, False), (2, 10, True), (20, 30, True), (51, 1000, True), (50, 1000, False)],
)
def test_a_data_set_is_refused_by_its_share_of_bad_samples_and_never_for_one(
    bad: int, total: int, refused: bool
) -> None:
    with pytest.raises(TesseraError) if refused else contextlib.nullcontext() as raised:
        check_measured(bad, total, 0.05, [SourceSection(path=Path("a b.jsonl"), root=Path("media"))])
    if raised is not None:
        assert "tessera data doctor 'a b.jsonl' --root media" in str(raised.value.fix)


def test_recordings_for_a_model_of_codes_are_answered_with_the_missing_step() -> None:
    first = [BadSample(name, "this model has no audio input", "media.kind-not-supported") for name in "ab"]
    with pytest.raises(TesseraError) as raised:
        check_measured(2, 2, 0.05, [SourceSection(path=Path("a.jsonl"))], first)
    assert "tessera data features RECIPE -o codes" in str(raised.value.fix)
    assert "model.config.reads_media=true" in str(raised.value.fix)  # codes of answers do not help with questions


def test_a_share_at_its_limit_is_no_alarm_in_a_long_run_and_a_larger_one_soon_is() -> None:
    def first_alarm(share: float, samples: int, seed: int) -> int | None:
        draws, bad = random.Random(seed), 0
        for read in range(1, samples + 1):
            bad += draws.random() < share
            try:
                check_read(bad, read, 0.05)
            except TesseraError:
                return read
        return None

    assert [first_alarm(0.05, 5000, seed) for seed in range(20)] == [None] * 20
    assert max(first_alarm(2 / 3, 100, seed) or 101 for seed in range(20)) <= 60
    assert max(first_alarm(0.1, 5000, seed) or 5001 for seed in range(20)) <= 5000
    check_read(10**6, 10**6, 1.0)


@pytest.mark.parametrize("limit", [0.05, 1.0])
def test_a_run_that_uses_none_of_its_first_samples_ends(limit: float, tmp_path: Path) -> None:
    numbers: Any = dict
    quarantine = Quarantine((), 0, limit)
    quarantine.on_start(rank(tmp_path, True))
    torn = [Batch({}, sample_ids=(id,), problems=((id, "torn"),)) for id in "abcab"]
    for step, batch in enumerate(torn[:4], 1):
        quarantine.on_step_end(rank(tmp_path, True), StepResult(step, numbers, 0.1, [batch]))
    with raises("data.no-usable-sample"):
        quarantine.on_step_end(rank(tmp_path, True), StepResult(5, numbers, 0.1, torn[4:]))


def test_a_new_run_begins_with_an_empty_quarantine(tmp_path: Path) -> None:
    for reason in ("torn", "missing"):
        quarantine = Quarantine([("a", reason)], 1)
        quarantine.on_start(rank(tmp_path, True))
        quarantine.on_end(rank(tmp_path, True))
    assert [row["reason"] for row in read_jsonl(tmp_path / "quarantine.jsonl")] == ["missing"]


def test_samples_that_the_guard_leaves_out_are_no_bad_files(tmp_path: Path) -> None:
    ids = tuple(f"sample-{number}" for number in range(40))
    batch = Batch({}, sample_ids=ids, problems=tuple((id, "bad numbers in step 3") for id in ids[:20]))
    numbers: Any = dict
    for guarded in (ids, ()):
        quarantine = Quarantine((), 0, 0.05, lambda guarded=guarded: guarded)
        quarantine.on_start(rank(tmp_path, True))
        with contextlib.nullcontext() if guarded else raises("data.too-many-bad-samples", "20", "40"):
            quarantine.on_step_end(rank(tmp_path, True), StepResult(1, numbers, 0.1, [batch]))


def test_a_number_of_workers_that_cannot_be_is_explained_in_one_line() -> None:
    with raises("recipe.wrong-value") as raised:
        build(DataSection, {"workers": -1}, "data")
    assert "literal" not in str(raised.value)
