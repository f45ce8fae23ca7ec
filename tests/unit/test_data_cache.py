"""Runs over one data set share its index through the user's cache, and each run keeps the one it began with."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_cases import TroubleProcessor, pictures, row, write_jsonl
from PIL import Image

from tessera.config.run_config import SourceSection
from tessera.data import cache
from tessera.data.index import build as build_module
from tessera.data.index.build import IndexMaker
from tessera.data.index.split import SplitIndex
from tessera.data.media.files import Limits
from tessera.data.tables import MemoryTables, keep_tables
from tests.errors import raises


@pytest.fixture(autouse=True)
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(build_module, "_COMPARED", 8)
    return tmp_path / "cache" / "index"


@pytest.fixture
def records(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "a.jsonl", [row("q", "a" * (1 + i % 20), id=f"s{i}") for i in range(100)])


def build(path: Path, run: Path, **options: Any) -> tuple[SplitIndex, int]:
    """Return the index and how many samples were measured for it."""
    tally = run.with_suffix(".tally")
    tally.write_bytes(b"")
    chosen = {"length": 64, "limits": Limits(), "on_bad_sample": "skip", "workers": 0, **options}
    processor = TroubleProcessor(tally=tally)
    maker = IndexMaker(processor, cache_folder=run / "index", **chosen)
    return maker.index([SourceSection(path=path)]), tally.stat().st_size


def test_a_second_run_measures_only_what_it_compares(records: Path, tmp_path: Path) -> None:
    first, measured = build(records, tmp_path / "first")
    assert measured == 100
    second, measured = build(records, tmp_path / "second")
    assert measured == 8
    assert second.identity == first.identity
    assert np.array_equal(second.column("tokens"), first.column("tokens"))
    assert build(records, tmp_path / "second")[1] == 0, "a resume compares nothing"


def test_a_run_keeps_its_index_when_the_cache_is_removed(records: Path, tmp_path: Path, shared: Path) -> None:
    first, _ = build(records, tmp_path / "first", length=10)
    for file in shared.iterdir():
        file.unlink()
    again, measured = build(records, tmp_path / "first", length=10)
    assert (measured, again.identity) == (0, first.identity)


def test_changed_media_is_measured_again(tmp_path: Path) -> None:
    names = [f"{number}.png" for number in range(4)]
    pictures(tmp_path, names)
    rows = [row("<image>q", "a", image=name, id=name) for name in names]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    first, measured = build(path, tmp_path / "first")
    assert measured == 4
    for name in names:
        Image.new("RGB", (33, 44)).save(tmp_path / name)
    second, measured = build(path, tmp_path / "second")
    assert measured == 8, "four that are compared, and then all four"
    assert second.identity != first.identity or list(second.column("tokens")) != list(first.column("tokens"))


def test_a_mended_sample_is_used_by_the_next_run(tmp_path: Path) -> None:
    names = [f"{number}.png" for number in range(3)]
    pictures(tmp_path, names)
    path = write_jsonl(tmp_path / "a.jsonl", [row("<image>q", "a", image=name, id=name) for name in names])
    content = (tmp_path / names[1]).read_bytes()
    (tmp_path / names[1]).unlink()
    assert build(path, tmp_path / "first")[0].bad_count == 1
    (tmp_path / names[1]).write_bytes(content)
    assert build(path, tmp_path / "first")[0].bad_count == 1, "a run goes on with the samples that it began with"
    assert build(path, tmp_path / "second")[0].bad_count == 0


@pytest.mark.parametrize("damage", ["empty", "flipped"])
def test_a_damaged_file_of_the_cache_is_not_used(records: Path, tmp_path: Path, shared: Path, damage: str) -> None:
    first, _ = build(records, tmp_path / "first")
    for file in shared.glob("*.safetensors"):
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.unlink()  # not written over: it is mapped
        file.write_bytes(b"" if damage == "empty" else content)
    second, measured = build(records, tmp_path / "second")
    assert (measured, second.identity) == (100, first.identity)


def test_a_cache_that_cannot_be_written_costs_a_warning(
    records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path / "file"))
    cache.warn_once.cache_clear()
    index, measured = build(records, tmp_path / "first")
    assert (measured, len(index)) == (100, 100)
    assert [cache.CACHE_VARIABLE in message for message in caplog.messages if "cache" in message] == [True]
    assert build(records, tmp_path / "first")[1] == 0


def test_a_user_without_a_home_folder_gets_the_same_warning(
    records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(cache.CACHE_VARIABLE)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user id without a name
    monkeypatch.chdir(tmp_path)
    cache.warn_once.cache_clear()
    assert build(records, tmp_path / "first")[1] == 100
    assert [cache.CACHE_VARIABLE in message for message in caplog.messages if "cache" in message] == [True]
    assert not (tmp_path / "~").exists()


def test_a_full_disk_leaves_no_part_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(tensors: Any, file: Path, metadata: Any) -> None:
        file.write_bytes(b"part")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("safetensors.numpy.save_file", fill)
    with raises("data.index-not-writable"):
        keep_tables(tmp_path / "a.safetensors", MemoryTables({"a": np.arange(3)}, {"key": "k"}))
    assert list(tmp_path.iterdir()) == []


def test_files_that_nobody_uses_are_removed(records: Path, tmp_path: Path, shared: Path) -> None:
    shared.mkdir(parents=True)
    for name, days in (("index-old.safetensors", 90), ("index-new.safetensors", 9)):
        (shared / name).touch()
        os.utime(shared / name, (time.time() - days * 86400,) * 2)
    build(records, tmp_path / "first")
    names = {file.name for file in shared.iterdir()}
    assert "index-new.safetensors" in names
    assert "index-old.safetensors" not in names
    assert not [name for name in names if name.endswith(".part")]
