"""Conversions between folders that are killed, stopped or meet a full disk go on, or leave nothing."""

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
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_folders import small_folder

import tessera
from tessera.checkpoint import publish
from tessera.checkpoint.hf import save_folder
from tessera.checkpoint.planned_folder import PlannedFolder
from tessera.checkpoint.state import model_tensors
from tessera.config.run_config import ModelSection
from tessera.errors import TesseraError
from tessera.models import build_on_meta, resolve
from tessera.runtime import progress
from tests.dist.spawn import fork_context
from tests.toys.chat_set import chat_recipe, write_chat_set
from tests.toys.fragile_conversion import convert, killed_at
from tests.toys.memory import peak_mib


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_folder("qwen2_vl", tmp_path_factory.mktemp("hf"))


def same(one: Path, other: Path) -> bool:
    names = [sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()) for root in (one, other)]
    return names[0] == names[1] and all(filecmp.cmp(one / name, other / name, shallow=False) for name in names[0])


@pytest.fixture(scope="module")
def expected(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """What one uninterrupted conversion writes, and the points at which it could have failed."""
    points: list[str] = []
    target = tmp_path_factory.mktemp("whole") / "mm"
    convert(folder, target, points.append)
    assert len(points) > 60
    return target, points


def kill_and_go_on(moments: list[int], source: Path, expected: Path, target: Path) -> None:
    """Each process begins where the one before it was killed; the last is not killed."""
    for number in moments:
        process = fork_context().Process(target=killed_at, args=(number, source, target))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert not target.exists()
    convert(source, target)
    assert same(target, expected)
    assert [path.name for path in target.parent.iterdir()] == [target.name]


def test_killed_at_three_moments_it_goes_on_and_is_the_same_bit_for_bit(
    folder: Path, expected: tuple[Path, list[str]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, points = expected
    last = next(number for number, point in enumerate(points) if point.startswith("rename "))
    chance = random.Random(0)
    early, middle = chance.randrange(5, 20), chance.randrange(5, 20)
    with caplog.at_level(logging.INFO, logger="tessera"):
        # Groups that are noted take no more points of failure: the second begins behind the first.
        kill_and_go_on([early, middle, last - early - middle - 8], folder, whole, tmp_path / "mm")
    assert "going on: " in caplog.text


@pytest.mark.slow
def test_killed_at_twenty_moments_each_goes_on(folder: Path, expected: tuple[Path, list[str]], tmp_path: Path) -> None:
    whole, points = expected
    last = next(number for number, point in enumerate(points) if point.startswith("rename "))
    for number in random.Random(1).sample(range(last + 1), 20):
        kill_and_go_on([number], folder, whole, tmp_path / "mm")
        shutil.rmtree(tmp_path / "mm")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run")
    recipe = chat_recipe(write_chat_set(root, samples=8), root, steps=1)
    recipe["data"]["eval"] = []
    return tessera.train(recipe).folder


@pytest.mark.parametrize("kind", ["run", *(pytest.param(k, marks=pytest.mark.slow) for k in ("fp8", "hf", "dcp"))])
def test_every_form_goes_on_after_a_kill(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, points = request.getfixturevalue("run" if kind == "run" else "folder"), list[str]()
    whole, target = tmp_path / "whole" / "out", tmp_path / "killed" / "out"
    convert(source, whole, points.append, kind)
    noted = [number for number, point in enumerate(points) if point.startswith("note ")]
    process = fork_context().Process(target=killed_at, args=(noted[len(noted) // 2], source, target, kind))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not target.exists()
    with caplog.at_level(logging.INFO, logger="tessera"):
        convert(source, target, kind=kind)
    assert "going on: " in caplog.text
    for folder in (whole, target):  # which has the time of writing
        record = json.loads((folder / publish.MARK).read_text())
        record.pop("written", None)
        (folder / publish.MARK).write_text(json.dumps(record))
    assert same(whole, target)


class Stop(Exception):
    """Stands for anything that ends a process between two groups."""


def begun(source: Path, target: Path, groups: int = 20) -> Path:
    """Leave a conversion of which some groups are written, and return its staging folder."""
    left = groups

    def fault(point: str) -> None:
        nonlocal left
        left -= point.startswith("note ")
        if left < 0:
            raise Stop

    with pytest.raises(Exception, match="Stop"):
        convert(source, target, fault)
    assert publish.staging_of(target).is_dir()
    assert not target.exists()
    return publish.staging_of(target)


def test_only_the_same_job_with_the_same_source_goes_on(
    folder: Path, expected: tuple[Path, list[str]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = shutil.copytree(folder, tmp_path / "hf")
    begun(source, tmp_path / "mm")
    with caplog.at_level(logging.INFO, logger="tessera"):
        weights = next(source.glob("*.safetensors"))
        os.utime(weights, ns=(1, 1))
        convert(source, tmp_path / "mm")
        assert "the source has changed" in caplog.text
        shutil.rmtree(tmp_path / "mm")
        begun(source, tmp_path / "mm")
        caplog.clear()
        tessera.convert(source, tmp_path / "mm", to="dcp")
        assert "another job" in caplog.text
        begun(source, tmp_path / "other")
        (publish.staging_of(tmp_path / "other") / "latest_checkpointed_iteration.txt").unlink()
        caplog.clear()
        convert(source, tmp_path / "other")
        assert "not what it had written" in caplog.text
        assert "going on" not in caplog.text
    for written in (tmp_path / "other", shutil.copytree(expected[0], tmp_path / "expected")):
        (written / publish.MARK).unlink()  # which says where the source lies
    assert same(tmp_path / "other", tmp_path / "expected")


def test_damage_in_what_was_written_is_found_and_mended(
    folder: Path, expected: tuple[Path, list[str]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    staging = begun(folder, tmp_path / "mm")
    damaged = max(staging.rglob("*.pt"), key=lambda path: path.stat().st_blocks)
    content = damaged.read_bytes()
    written = [position for position in range(0, len(content), 64) if any(content[position : position + 64])]
    with damaged.open("r+b") as file:
        file.seek(written[len(written) // 2])  # in a tensor: most of what is written is one
        file.write(bytes(64))
    journal = staging.with_name(staging.name + ".journal")
    journal.write_bytes(journal.read_bytes() + b"a line that was torn")
    with caplog.at_level(logging.WARNING, logger="tessera"):
        convert(folder, tmp_path / "mm")
    assert "is written again" in caplog.text
    assert same(tmp_path / "mm", expected[0])


def test_two_at_once_on_one_target_are_refused(folder: Path, tmp_path: Path) -> None:
    said: list[str] = []

    def fault(point: str) -> None:
        if not said:
            with pytest.raises(TesseraError, match="another process") as refused:
                convert(folder, tmp_path / "mm")
            said.append(str(refused.value))

    convert(folder, tmp_path / "mm", fault)
    assert str(tmp_path / "mm") in said[0]


def test_a_full_disk_is_said_before_and_while_writing(
    folder: Path, expected: tuple[Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = sum(path.stat().st_size for path in expected[0].rglob("*") if path.is_file() and path.suffix != ".json")
    with monkeypatch.context() as patched:
        patched.setattr(publish, "free_bytes", lambda _: needed - 1)
        with pytest.raises(TesseraError, match=rf"{needed} bytes\) are needed"):
            convert(folder, tmp_path / "mm")
        assert list(tmp_path.iterdir()) == []
        patched.setattr(publish, "free_bytes", lambda _: needed)
        plain, left = PlannedFolder.put, 9

        def full(self: PlannedFolder, name: str, *given: Any) -> list[int]:
            nonlocal left
            left -= 1
            if not left:
                raise OSError(errno.ENOSPC, "No space left on device")
            return plain(self, name, *given)

        patched.setattr(PlannedFolder, "put", full)
        with pytest.raises(TesseraError, match="No space left") as refused:
            convert(folder, tmp_path / "mm")
        assert f"{needed} bytes" in str(refused.value)
        assert not (tmp_path / "mm").exists()
    convert(folder, tmp_path / "mm")
    assert same(tmp_path / "mm", expected[0])


def test_a_source_in_several_types_is_refused_and_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    source = shutil.copytree(folder, tmp_path / "hf")
    (path,) = source.glob("*.safetensors")
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("k_proj.weight"))
    save_file(tensors | {name: tensors[name].double()}, path)
    with pytest.raises(TesseraError, match=r"stored in different types"):
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


def test_a_target_inside_of_the_source_goes_on_as_well(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = shutil.copytree(folder, tmp_path / "hf")
    begun(source, source / "mm")
    with caplog.at_level(logging.INFO, logger="tessera"):
        convert(source, source / "mm")
    assert "going on: " in caplog.text


@pytest.mark.parametrize("jobs", [1, 3])
def test_threads_write_the_same(folder: Path, tmp_path: Path, jobs: int) -> None:
    tessera.convert(folder, tmp_path / "mm", to="mm", layout={"tp": 2}, jobs=jobs)
    tessera.convert(folder, tmp_path / "again", to="mm", layout={"tp": 2})
    assert same(tmp_path / "mm", tmp_path / "again")


def test_no_threads_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TesseraError, match="0 threads"):
        tessera.convert(folder, tmp_path / "mm", to="mm", jobs=0)


@pytest.mark.slow
def test_stopped_by_the_user_it_says_how_to_go_on(folder: Path, tmp_path: Path) -> None:
    """The real command: one clear line, exit code 130, and the same command ends the work."""
    words = [sys.executable, "-m", "tessera.cli.main", "convert", str(folder), str(tmp_path / "mm"), "--to", "mm"]
    slow = "import time, tessera.checkpoint.planned_folder as f\nplain = f.PlannedFolder.put\n"
    slow += "f.PlannedFolder.put = lambda *given: (time.sleep(0.2), plain(*given))[1]\n"
    slow += f"import sys\nfrom tessera.cli.main import main\nsys.argv = ['tessera', *{words[3:]!r}]\nmain()\n"
    process = subprocess.Popen([sys.executable, "-c", slow], stderr=subprocess.PIPE, text=True)
    journal = publish.staging_of(tmp_path / "mm").with_name(".staging-mm~convert.journal")
    while process.poll() is None and (not journal.exists() or journal.read_bytes().count(b"\n") < 4):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 130
    assert "stopped; what is written is kept" in said
    assert "Traceback" not in said
    again = subprocess.run(words, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert "going on: " in again.stderr


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


def foreign_journal(journal: Path, line: str) -> None:
    """Add a line whose checksum is right, and its content not what is ever noted."""
    with journal.open("a") as file:
        file.write(f"{zlib.crc32(line.encode()):08x} {line}\n")


@pytest.mark.parametrize(
    "line",
    ['{"version": 1}', '{"group": 99999, "checksums": {}}', '{"group": 0, "checksums": {"a": ["b"]}}', "[", "[]"],
)
def test_lines_of_a_journal_that_nobody_noted_have_no_say(
    folder: Path, expected: tuple[Path, list[str]], tmp_path: Path, line: str
) -> None:
    staging = begun(folder, tmp_path / "mm")
    foreign_journal(staging.with_name(staging.name + ".journal"), line)
    convert(folder, tmp_path / "mm")
    assert same(tmp_path / "mm", expected[0])


@pytest.mark.parametrize("kind", ["pipe", "link", "file"])
def test_what_is_no_folder_in_the_place_of_the_staging_folder_is_replaced(
    folder: Path, tmp_path: Path, kind: str
) -> None:
    staging = publish.staging_of(tmp_path / "mm")
    (tmp_path / "precious").mkdir()
    make = {"pipe": lambda: os.mkfifo(staging), "link": lambda: staging.symlink_to("precious"), "file": staging.touch}
    make[kind]()
    convert(folder, tmp_path / "mm")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mm", "precious"]


def test_weights_that_change_while_they_are_read_are_refused(folder: Path, tmp_path: Path) -> None:
    source = shutil.copytree(folder, tmp_path / "hf")

    def fault(point: str) -> None:
        if point == "sync":
            os.utime(next(source.glob("*.safetensors")), ns=(1, 1))

    with pytest.raises(TesseraError, match="changed while it was read"):
        convert(source, tmp_path / "mm", fault)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("form", ["mm", "hf"])
@pytest.mark.parametrize("length", [250, 300])
def test_a_name_that_is_too_long_is_refused(folder: Path, tmp_path: Path, form: Any, length: int) -> None:
    with pytest.raises(TesseraError, match="too long"):
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
    ("options", "message"),
    [
        ({"to": "mm", "layout": {1: 2}}, "a layout has no 1"),
        ({"jobs": -1}, "-1 threads"),
        ({"prefix": "model."}, "no DCP folder is read or written"),
    ],
)
def test_options_that_mean_nothing_here_are_refused(
    folder: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(TesseraError, match=message):
        tessera.convert(folder, tmp_path / "out", **options)
