"""The doctor sorts the files of strangers into the right findings, and decodes them in worker processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tessera.config.run_config import SourceSection
from tessera.data.index.measure import default_workers, measure_all
from tessera.tools.data_doctor import examine as doctor
from tessera.tools.data_doctor.findings import KIND_OF_CODE, KINDS
from tests.unit.data_cases import pictures, seen, write_jsonl


def test_paths_that_lead_to_no_file_are_missing_files(tmp_path: Path) -> None:
    (tmp_path / "circle.png").symlink_to("circle.png")
    (tmp_path / "dangling.png").symlink_to("gone.png")
    rows = [seen(name, id=name[:9]) for name in ("circle.png", "dangling.png", "long" * 100 + ".png")]
    file = write_jsonl(tmp_path / "set.jsonl", rows)
    diagnosis = doctor.examine([SourceSection(path=file)], workers=0, samples=0)
    assert {name: finding.count for name, finding in diagnosis.findings.items()} == {"missing-file": 3}


def test_each_code_has_a_kind_of_finding() -> None:
    assert set(KIND_OF_CODE.values()) <= set(KINDS)
    assert KIND_OF_CODE["data.record-too-large"] == "bad-row"


@pytest.mark.parametrize(("decode", "expected"), [(False, "auto"), (True, default_workers())])
def test_media_are_decoded_in_worker_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decode: bool, expected: int | str
) -> None:
    """Only worker processes limit the memory that decoding takes."""
    requested = []

    def measured(work: Any, *, workers: int | str, title: str) -> Any:
        requested.append(workers)
        return measure_all(work, workers=0, title=title)

    monkeypatch.setattr(doctor, "measure_all", measured)
    pictures(tmp_path, ["a.png"])
    file = write_jsonl(tmp_path / "set.jsonl", [seen("a.png", id="a")])
    doctor.examine([SourceSection(path=file)], decode=decode, samples=0)
    assert requested == [expected]
