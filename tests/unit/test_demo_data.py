"""The demo set that ships: whole, small, readable by every kind of data, and written in one go."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

import tessera
from tessera.config.run_config import SourceSection
from tessera.tools import demo_data
from tessera.tools.data_doctor.examine import examine
from tests.errors import raises

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "tessera" / "tools" / "demo_set"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tessera.demo(tmp_path_factory.mktemp("data") / "demo").folder


def test_rows_name_images_that_are_there_and_all_images_are_used(demo: Path) -> None:
    used: set[str] = set()
    for name in ("train.jsonl", "held_out.jsonl", "pairs.jsonl"):
        for line in (demo / name).read_text(encoding="utf-8").splitlines():
            for message in json.loads(line)["messages"]:
                parts = message["content"] if isinstance(message["content"], list) else []
                used |= {part["image"] for part in parts if part["type"] == "image"}
    assert used == {f"images/{path.name}" for path in (demo / "images").iterdir()}


def test_the_set_is_small_and_no_held_out_image_is_trained_on(demo: Path) -> None:
    assert sum(path.stat().st_size for path in SHIPPED.rglob("*") if path.is_file()) < 300_000
    train, held_out = ((demo / name).read_text(encoding="utf-8") for name in ("train.jsonl", "held_out.jsonl"))
    images = [
        part["image"] for line in held_out.splitlines() for part in json.loads(line)["messages"][0]["content"][:1]
    ]
    assert len(images) == len(held_out.splitlines())
    assert [image for image in images if f'"{image}"' in train] == []


def test_the_doctor_finds_nothing_wrong_with_it(demo: Path) -> None:
    sets = [SourceSection(path=demo / name) for name in ("train.jsonl", "held_out.jsonl")]
    assert examine(sets, workers=0).exit_code == 0


def test_sources_and_licences_of_all_images_are_named(demo: Path) -> None:
    said = (demo / "SOURCES.md").read_text(encoding="utf-8")
    names = {path.stem for path in (demo / "images").iterdir()}
    assert [name for name in names if f"`{name}`" not in said and not name.startswith("digit-")] == []
    assert said.count("CC BY") == 3


def test_it_is_written_the_same_each_time_and_replaces_nothing_unasked(demo: Path, tmp_path: Path) -> None:
    def hashes(folder: Path) -> dict[str, str]:
        files = [path for path in folder.rglob("*") if path.is_file()]
        return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "mine.txt").write_text("mine")
    with raises("output.folder-not-empty"):
        tessera.demo(tmp_path / "demo")
    with raises("output.not-an-export"):
        tessera.demo(tmp_path / "demo", overwrite=True)
    assert (tmp_path / "demo" / "mine.txt").read_text() == "mine"
    (tmp_path / "demo" / "mine.txt").unlink()
    tessera.demo(tmp_path / "demo")
    tessera.demo(tmp_path / "demo", overwrite=True)
    assert hashes(tmp_path / "demo") == hashes(demo)
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]
    rows = tmp_path / "demo" / "train.jsonl"
    rows.write_text(changed := rows.read_text() + "\n")
    tessera.demo(tmp_path / "demo")  # it is there: two pages begin with it
    assert rows.read_text() == changed


def test_an_installation_without_the_set_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_data, "_SHIPPED", tmp_path / "nothing")
    with raises("environment.demo-set-missing"):
        tessera.demo(tmp_path / "demo")
    assert not (tmp_path / "demo").exists()


def test_the_working_folder_is_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    monkeypatch.chdir(inside)
    for target in (".", "..", inside):
        with raises("output.target-holds-working-folder"):
            tessera.demo(target, overwrite=True)
    assert inside.is_dir()


def test_a_full_disk_is_the_users_to_mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: Path, target: Path, **_: object) -> None:
        raise shutil.Error([(str(source), str(target), "[Errno 28] No space left on device")])

    monkeypatch.setattr("shutil.copytree", full)
    with raises("output.write-failed"):
        tessera.demo(tmp_path / "demo")
    assert list(tmp_path.iterdir()) == []
