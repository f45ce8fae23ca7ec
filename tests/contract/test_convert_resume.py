"""Conversions that are killed, stopped or meet a full disk publish nothing, and the same command starts again."""

from __future__ import annotations

import errno
import filecmp
import json
import logging
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_folders import small_folder

import tessera
from tessera.checkpoint import publish, writer
from tessera.checkpoint.state import model_tensors
from tessera.checkpoint.writer import PlannedFolder
from tessera.config.run_config import ModelSection
from tessera.models import build_on_meta, resolve
from tessera.runtime import progress
from tests.dist.spawn import fork_context
from tests.errors import raises
from tests.toys.chat_set import chat_recipe, write_chat_set
from tests.toys.fragile_conversion import convert, killed_at
from tests.toys.memory import peak_mib
from tests.toys.save_folder import save_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_folder("qwen2_vl", tmp_path_factory.mktemp("hf"))


def same(folder: Path, other: Path) -> bool:
    names = [
        sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()) for root in (folder, other)
    ]
    return names[0] == names[1] and all(filecmp.cmp(folder / name, other / name, shallow=False) for name in names[0])


@pytest.fixture(scope="module")
def expected(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """What one uninterrupted conversion writes, and the points at which it could have failed."""
    points: list[str] = []
    target = tmp_path_factory.mktemp("whole") / "mm"
    convert(folder, target, points.append)
    assert len(points) > 60
    return target, points


def kill_and_start_again(moments: list[int], source: Path, expected: Path, target: Path) -> None:
    """Nothing is published by a process that is killed; the last one is not killed, and removes what they left."""
    for number in moments:
        process = fork_context().Process(target=killed_at, args=(number, source, target))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert not target.exists()
    convert(source, target)
    assert same(target, expected)
    assert [path.name for path in target.parent.iterdir()] == [target.name]


def test_killed_at_two_moments_it_starts_again_and_is_the_same_bit_for_bit(
    folder: Path, expected: tuple[Path, list[str]], tmp_path: Path
) -> None:
    whole, points = expected
    last = next(number for number, point in enumerate(points) if point.startswith("rename "))
    kill_and_start_again([random.Random(0).randrange(5, last), last], folder, whole, tmp_path / "mm")


@pytest.mark.slow
def test_killed_at_twenty_moments_nothing_is_published(
    folder: Path, expected: tuple[Path, list[str]], tmp_path: Path
) -> None:
    whole, points = expected
    last = next(number for number, point in enumerate(points) if point.startswith("rename "))
    for number in random.Random(1).sample(range(last + 1), 20):
        kill_and_start_again([number], folder, whole, tmp_path / "mm")
        shutil.rmtree(tmp_path / "mm")


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_while_an_earlier_export_is_replaced_one_of_both_is_there(
    every: int, folder: Path, expected: tuple[Path, list[str]], tmp_path: Path
) -> None:
    """At every point of publishing: the old folder, the new one, or (between two renames) the old one aside."""
    whole, points = expected
    first = next(number for number, point in enumerate(points) if point.startswith("rename "))
    for number in range(first, len(points) + 3, every):  # three more points: the old folder is moved aside
        target = shutil.copytree(whole, tmp_path / str(number) / "mm")
        (target / "old").touch()
        process = fork_context().Process(target=killed_at, args=(number, folder, target))
        process.start()
        process.join()
        aside = list(target.parent.glob(".trash-mm~*"))
        there = target if target.exists() else aside[0]
        (there / "old").unlink(missing_ok=True)
        assert same(there, whole), number
        convert(folder, target)
        assert same(target, whole)
        assert [path.name for path in target.parent.iterdir()] == ["mm"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run")
    recipe = chat_recipe(write_chat_set(root, samples=8), root, steps=1)
    recipe["data"]["eval"] = []
    return tessera.train(recipe).folder


@pytest.mark.parametrize("kind", ["run", *(pytest.param(k, marks=pytest.mark.slow) for k in ("fp8", "hf", "dcp"))])
def test_every_form_starts_again_after_a_kill(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    source, points = request.getfixturevalue("run" if kind == "run" else "folder"), list[str]()
    whole, target = tmp_path / "whole" / "out", tmp_path / "killed" / "out"
    convert(source, whole, points.append, kind)
    writes = [number for number, point in enumerate(points) if point.startswith("write ")]
    process = fork_context().Process(target=killed_at, args=(writes[len(writes) // 2], source, target, kind))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not target.exists()
    convert(source, target, kind=kind)
    assert [path.name for path in target.parent.iterdir()] == ["out"]
    for folder in (whole, target):  # which has the time of writing
        record = json.loads((folder / publish.MARK).read_text())
        record.pop("written", None)
        (folder / publish.MARK).write_text(json.dumps(record))
    assert same(whole, target)


def test_of_two_conversions_to_one_target_both_end(
    folder: Path, expected: tuple[Path, list[str]], tmp_path: Path
) -> None:
    """Each has a staging folder; the last to end replaces the other, which is an export of the same source."""
    begun: list[str] = []

    def fault(point: str) -> None:
        if not begun:
            begun.append(point)
            convert(folder, tmp_path / "mm")

    convert(folder, tmp_path / "mm", fault)
    assert same(tmp_path / "mm", expected[0])
    assert [path.name for path in tmp_path.iterdir()] == ["mm"]


def test_a_full_disk_is_said_before_and_while_writing(
    folder: Path, expected: tuple[Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = sum(path.stat().st_size for path in expected[0].rglob("*") if path.is_file() and path.suffix != ".json")
    with monkeypatch.context() as patched:
        patched.setattr(writer, "free_bytes", lambda _: needed - 1)
        with raises("output.disk-full", str(needed)):
            convert(folder, tmp_path / "mm")
        assert list(tmp_path.iterdir()) == []
        patched.setattr(writer, "free_bytes", lambda _: needed)
        plain, remaining = PlannedFolder.put, 9

        def full(self: PlannedFolder, name: str, *arguments: Any) -> None:
            nonlocal remaining
            remaining -= 1
            if not remaining:
                raise OSError(errno.ENOSPC, "No space left on device")
            plain(self, name, *arguments)

        patched.setattr(PlannedFolder, "put", full)
        with raises("output.write-failed") as refused:
            convert(folder, tmp_path / "mm")
        assert f"{needed} bytes" in str(refused.value)
        assert list(tmp_path.iterdir()) == []
    convert(folder, tmp_path / "mm")
    assert same(tmp_path / "mm", expected[0])


def test_a_source_in_several_types_is_refused_and_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    source = shutil.copytree(folder, tmp_path / "hf")
    (path,) = source.glob("*.safetensors")
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("k_proj.weight"))
    save_file(tensors | {name: tensors[name].double()}, path)
    with raises("weights.mixed-dtypes"):
        convert(source, tmp_path / "mm")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_progress_says_how_much_how_fast_and_how_long(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress, "_EVERY", 0.0)
    with caplog.at_level(logging.INFO, logger="tessera"):
        convert(folder, tmp_path / "mm")
    lines = [record.message for record in caplog.records if " s left" in record.message]
    assert len(lines) > 10
    assert all("B of " in line and "B/s, " in line for line in lines)
    assert lines[-1].endswith(" 0 s left")


def test_a_target_inside_of_the_source_is_written(
    folder: Path, expected: tuple[Path, list[str]], tmp_path: Path
) -> None:
    source = shutil.copytree(folder, tmp_path / "hf")
    convert(source, source / "mm")
    for written in (source / "mm", shutil.copytree(expected[0], tmp_path / "expected")):
        (written / publish.MARK).unlink()  # which has the hash of the path of the source
    assert same(source / "mm", tmp_path / "expected")


@pytest.mark.parametrize("jobs", [1, 3])
def test_threads_write_the_same(folder: Path, tmp_path: Path, jobs: int) -> None:
    tessera.convert(folder, tmp_path / "mm", to="mm", layout={"tp": 2}, jobs=jobs)
    tessera.convert(folder, tmp_path / "again", to="mm", layout={"tp": 2})
    assert same(tmp_path / "mm", tmp_path / "again")


def test_no_threads_are_refused(folder: Path, tmp_path: Path) -> None:
    with raises("output.too-few-threads"):
        tessera.convert(folder, tmp_path / "mm", to="mm", jobs=0)


@pytest.mark.slow
def test_stopped_by_the_user_it_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    """The real command: one clear line, exit code 130, and the same command ends the work."""
    words = [sys.executable, "-m", "tessera.cli.main", "convert", str(folder), str(tmp_path / "mm"), "--to", "mm"]
    slow = "import time, tessera.checkpoint.writer as f\nplain = f.PlannedFolder.put\n"
    slow += "f.PlannedFolder.put = lambda *arguments: (time.sleep(0.2), plain(*arguments))[1]\n"
    # A shell in the background ignores SIGINT, and its processes inherit that.
    slow += "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    slow += f"import sys\nfrom tessera.cli.main import main\nsys.argv = ['tessera', *{words[3:]!r}]\nmain()\n"
    process = subprocess.Popen([sys.executable, "-c", slow], stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not list(tmp_path.glob(".staging-mm~*")):
        time.sleep(0.05)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 130
    assert "stopped: nothing was published" in said
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []
    again = subprocess.run(words, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr


def large_folder(folder: Path, layers: int) -> int:
    """Write a folder of a few large tensors for each layer, and return its bytes."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128, "mrope_section": [16, 24, 24]}
    changes = {f"text.{key}": value for key, value in (sizes | heads).items()}
    spec, config = resolve(ModelSection(family="qwen2_vl", preset="quickstart", config=changes))
    module = build_on_meta(spec, config).to(torch.bfloat16)
    weight_map = spec.main.weight_map(config)
    assert weight_map is not None
    zeros = {"prepare": lambda _, blank: torch.zeros(blank.shape, dtype=blank.dtype)}
    save_folder(folder, model_tensors(module), weight_map, config.to_hf(), **zeros)
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def peak_of(source: Path, target: Path, results: Any) -> None:
    tessera.convert(source, target, to="mm", layout={"tp": 2}, jobs=2)
    results.put(peak_mib())


@pytest.mark.slow
def test_memory_is_that_of_the_tensors_in_work_and_not_of_the_folder(tmp_path: Path) -> None:
    sizes, peaks = [], []
    for layers in (2, 24):
        sizes.append(large_folder(tmp_path / f"hf-{layers}", layers) / 2**20)
        results = fork_context().SimpleQueue()
        process = fork_context().Process(target=peak_of, args=(tmp_path / f"hf-{layers}", tmp_path / "mm", results))
        process.start()
        process.join()
        peaks.append(results.get())
        shutil.rmtree(tmp_path / "mm")
    assert sizes[1] > 600
    # The largest group is gate and up, of 16 MiB. Each of two threads has it at most six times: read, made, divided,
    # written, read again, and joined. The small folder takes most of that, too.
    assert peaks[1] - peaks[0] < 2 * 6 * 16


@pytest.mark.parametrize("kind", ["pipe", "link", "file"])
def test_what_is_no_folder_in_the_place_of_a_staging_folder_is_removed(folder: Path, tmp_path: Path, kind: str) -> None:
    staging = tmp_path / ".staging-mm~0123abcd"
    (tmp_path / "precious").mkdir()
    make = {"pipe": lambda: os.mkfifo(staging), "link": lambda: staging.symlink_to("precious"), "file": staging.touch}
    make[kind]()
    convert(folder, tmp_path / "mm")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mm", "precious"]


@pytest.mark.parametrize("form", ["mm", "hf"])
@pytest.mark.parametrize("length", [250, 300])
def test_a_name_that_is_too_long_is_refused(folder: Path, tmp_path: Path, form: Any, length: int) -> None:
    with raises("output.write-failed"):
        tessera.convert(folder, tmp_path / ("x" * length), to=form, prove="never")
    assert list(tmp_path.iterdir()) == []


def test_more_files_than_a_shell_allows_are_written(folder: Path, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)["num_hidden_layers"]
    layout = {"llm": [text] + [0] * 99, "vit": [config["vision_config"]["depth"]] + [0] * 99}
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 64, hard))
    try:
        tessera.convert(folder, tmp_path / "mm", to="mm", layout=layout)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == used + 64
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(list((tmp_path / "mm").rglob("*.pt"))) == 100


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"to": "mm", "layout": {1: 2}}, "layout.unknown-key"),
        ({"jobs": -1}, "output.too-few-threads -1"),
        ({"prefix": "model."}, "output.option-without-effect"),
    ],
)
def test_options_that_mean_nothing_here_are_refused(
    folder: Path, tmp_path: Path, options: dict[str, Any], error: str
) -> None:
    with raises(error):
        tessera.convert(folder, tmp_path / "out", **options)
