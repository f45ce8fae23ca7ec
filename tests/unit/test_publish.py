"""Folders that are published: what they may replace, and exports to one target at the same time."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tessera.checkpoint import publish as publishing
from tessera.checkpoint.files import no_fault
from tessera.checkpoint.publish import MARK, begin, made_from, publish, show
from tessera.errors import TesseraError
from tests.errors import raises


def write(content: str) -> object:
    return lambda staging: (staging / "weights").write_text(content)


def test_the_same_export_is_replaced_and_another_one_is_not(tmp_path: Path) -> None:
    target = tmp_path / "out"
    publish(target, write("a"), origin=made_from("mm", tmp_path / "one"))  # type: ignore[arg-type]
    publish(target, write("b"), origin=made_from("mm", tmp_path / "x/../one"))  # type: ignore[arg-type]
    for other in (made_from("mm", "two"), made_from("dcp", tmp_path / "one"), None):
        with raises("output.folder-not-empty"):
            publish(target, write("c"), origin=other)  # type: ignore[arg-type]
    assert (target / "weights").read_text() == "b"
    publish(target, write("d"), origin=made_from("mm", "two"), overwrite=True)  # type: ignore[arg-type]
    assert (target / "weights").read_text() == "d"
    record = json.loads((target / MARK).read_text())
    assert record["origin"] == made_from("mm", "two")
    assert str(tmp_path) not in json.dumps(record)


@pytest.mark.parametrize(
    "files",
    [
        ["run.json", "config.yaml", "checkpoints/step-00000001/manifest.json"],
        [".lock"],  # a run that is just starting
        [MARK, "runs/chat/run.json"],
        ["thesis.txt"],
        ["config.json", "src/model.safetensors"],
        ["model.safetensors", "thesis.txt"],
    ],
)
def test_a_run_and_other_files_are_never_replaced(files: list[str], tmp_path: Path) -> None:
    for name in files:
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).touch()
    with raises("output.not-an-export"):
        publish(tmp_path / "out", write("a"), overwrite=True)  # type: ignore[arg-type]
    assert all((tmp_path / "out" / name).exists() for name in files)


@pytest.mark.parametrize("above", [False, True])
def test_the_home_folder_is_never_replaced(above: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users" / "me").mkdir(parents=True)
    target = tmp_path / "users" if above else tmp_path / "users" / "me"
    (target / MARK).touch()
    monkeypatch.setenv("HOME", str(tmp_path / "users" / "me"))
    with raises("output.not-an-export"):
        publish(target, write("a"), overwrite=True)  # type: ignore[arg-type]
    assert (target / MARK).exists()


@pytest.mark.parametrize(
    "files", [["config.json", "model.safetensors"], ["model_index.json"], ["adapter_config.json"], [".metadata"]]
)
def test_weights_of_other_programs_are_replaced_if_the_user_says_so(files: list[str], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for name in files:
        (tmp_path / "out" / name).touch()
    publish(tmp_path / "out", write("a"), overwrite=True)  # type: ignore[arg-type]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [MARK, "weights"]


def test_a_record_of_its_own_stays_and_gets_the_origin(tmp_path: Path) -> None:
    record = '{\n "format": "tessera-export",\n "tensors": {\n  "a": 1,\n  "b": 2\n }\n}\n'
    origin = made_from("hf", "one")
    publish(tmp_path / "out", lambda staging: (staging / MARK).write_text(record) and None, origin=origin)
    text = (tmp_path / "out" / MARK).read_text()
    assert json.loads(text) == {"origin": dict(origin), **json.loads(record)}
    assert '\n  "b": 2\n' in text  # a line for each tensor


def test_two_exports_to_one_target_leave_each_other_alone(tmp_path: Path) -> None:
    """The first to end is published. The other still has its files, and is refused unless it may overwrite."""
    target, origins = tmp_path / "out", [made_from("hf", name) for name in ("one", "two", "three")]
    first, second, third = (begin(target, False, origin) for origin in origins)
    third.discard()
    show(first.path, target, no_fault, origins[0], False)
    assert second.path.is_dir()
    with raises("output.folder-not-empty"):
        show(second.path, target, no_fault, origins[1], False)
    assert second.path.is_dir()
    show(second.path, target, no_fault, origins[1], True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert json.loads((target / MARK).read_text())["origin"] == origins[1]


def test_what_a_killed_export_left_is_removed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / ".staging-out~0123abcd").mkdir()
    (tmp_path / ".staging-out~convert.journal").write_text("")  # of an earlier release
    publish(tmp_path / "out", lambda staging: None)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_target_that_a_kill_left_between_two_renames_is_restored(tmp_path: Path) -> None:
    target, origin = tmp_path / "out", made_from("hf", "one")
    publish(target, write("old"), origin=origin)  # type: ignore[arg-type]
    target.rename(tmp_path / ".trash-out~0123abcd")
    with raises("output.folder-not-empty"):
        begin(target, False, made_from("hf", "two"))
    assert (target / "weights").read_text() == "old"
    publish(target, write("new"), origin=origin)  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


class Killed(BaseException):
    """End a process at a point of publishing: nothing behind it runs."""


def test_an_export_that_is_replaced_survives_a_kill_at_any_point(tmp_path: Path) -> None:
    """After a kill between the two renames, the next export restores the old folder."""
    ended, number = False, 0
    while not ended:
        target, remaining = tmp_path / str(number) / "out", number
        publish(target, write("old"))  # type: ignore[arg-type]
        (target.parent / ".trash-out~00000000").mkdir()  # an earlier process was killed while it removed this one
        staging = begin(target, True)
        (staging.path / "weights").write_text("new")

        def fault(point: str) -> None:
            nonlocal remaining
            remaining -= 1
            if remaining < 0:
                raise Killed

        try:
            show(staging.path, target, fault, None, True)
            ended = True
        except Killed:
            number += 1
        os.close(staging.lock)
        begin(target, True).discard()
        assert (target / "weights").read_text() in ("old", "new")
        publish(target, write("next"), overwrite=True)  # type: ignore[arg-type]
        assert [path.name for path in target.parent.iterdir()] == ["out"]
    assert number > 5


def test_a_staging_folder_that_another_process_removes_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its creation and its lock, the folder looks like one that a killed process left."""
    lock, folders = publishing._lock, list[Path]()

    def removed_once(path: Path) -> int | None:
        folders.append(path)
        if len(folders) == 1:
            path.rmdir()
        return lock(path)

    monkeypatch.setattr(publishing, "_lock", removed_once)
    staging = begin(tmp_path / "out", False)
    assert staging.path == folders[1]
    assert staging.path.is_dir()
    staging.discard()


def test_a_failed_export_leaves_no_folder_that_it_made(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()

    def fail(staging: Path) -> None:
        raise TesseraError("no")

    for target in (tmp_path / "new/deep/out", tmp_path / "old/out"):
        with pytest.raises(TesseraError):
            publish(target, fail)
    assert [path.name for path in tmp_path.rglob("*")] == ["old"]
