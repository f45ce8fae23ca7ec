"""The list of samples that could not be used, written by several ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tessera.core.config import build
from tessera.core.errors import TesseraError
from tessera.core.files import read_jsonl
from tessera.core.run_config import DataSection
from tessera.training.records import Quarantine


def rank(folder: Path, main: bool) -> Any:
    return SimpleNamespace(config=SimpleNamespace(folder=folder), world=SimpleNamespace(is_main=main))


def test_ranks_list_a_sample_once_and_count_what_all_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one, other = Quarantine([("a", "from its header")], in_all=4), Quarantine([("a", "from its header")], in_all=4)
    main, second = rank(tmp_path, True), rank(tmp_path, False)
    one.on_start(main)
    other.on_start(second)
    other.note("b", "truncated")
    one.note("b", "truncated")
    other.note("c", "gone")
    other.on_end(second)
    one.on_end(main)
    assert [row["id"] for row in read_jsonl(tmp_path / "quarantine.jsonl")] == ["a", "b", "c"]
    assert "skipped in all: 6; quarantine.jsonl in the run folder lists 3 of them" in caplog.text


def test_a_number_of_workers_that_cannot_be_is_explained_in_one_line() -> None:
    with pytest.raises(TesseraError, match="must be at least 0") as raised:
        build(DataSection, {"workers": -1}, "data")
    assert "literal" not in str(raised.value)
