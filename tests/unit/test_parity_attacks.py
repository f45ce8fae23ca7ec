"""The parity lab under attack: full disks, two writers, killed processes, NaN on both sides, settings of modules."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor, nn

from tessera.evaluation.parity.compare import compare_recordings
from tessera.evaluation.parity.recorder import Budget, record_call
from tessera.evaluation.parity.recording import (
    Moment,
    RankRecord,
    Recording,
    TensorEntry,
    claimed,
    read_recording,
    unfinished,
    write_rank,
    write_recording,
)
from tessera.evaluation.parity.results import as_json, lines, write_results
from tessera.tools.parity.steps import RecordSteps
from tessera.training.run import train
from tests.errors import raises
from tests.toys.chat_set import chat_recipe, write_chat_set


class Net(nn.Module):
    def __init__(self, eps: float = 1e-6, bad: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Linear(64, 64), nn.LayerNorm(64, eps), nn.Linear(64, 64)
        self.bad = bad

    def forward(self, x: Tensor) -> Tensor:
        x = 5 * self.first(x)
        x = self.second(self.norm(x))
        x[0, 0] += torch.full((), self.bad)
        return x.square().mean()


INPUTS = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))


def recording(module: nn.Module, budget: Budget | None = None) -> Recording:
    return Recording("net", [record_call(module, lambda model: model(INPUTS), budget)])


# ---------------------------------------------------------------------------------------------- what is reported


def test_an_eps_that_rounding_hides_is_reported(tmp_path: Path) -> None:
    a, b = recording(Net(1e-6)), recording(Net(1e-7))
    again = read_recording(write_recording(b, tmp_path / "b"))
    comparison = compare_recordings(a, again)
    assert comparison.first is None
    assert comparison.settings == ["norm: eps 1e-06 and 1e-07"]
    assert "norm: eps 1e-06 and 1e-07" in lines(comparison)
    assert as_json(comparison)["settings"] == comparison.settings
    assert compare_recordings(a, recording(Net(1e-6))).settings == []


def test_a_module_in_another_mode_is_reported() -> None:
    module = Net()
    module.norm.eval()
    assert compare_recordings(recording(Net()), recording(module)).settings == ["norm: training True and False"]


def test_whole_numbers_are_compared_between_equal_layouts_alone() -> None:
    a, b = recording(Net()), recording(Net())
    b.ranks[0].settings["first"]["out_features"] = 32
    assert compare_recordings(a, b).settings == ["first: out_features 64 and 32"]
    b.ranks[0].sizes = {"tp": 2}
    assert compare_recordings(a, b).settings == []


def test_nan_on_both_sides_is_reported(tmp_path: Path) -> None:
    a, b = recording(Net(bad=float("nan"))), recording(Net(bad=float("nan")))
    comparison = compare_recordings(a, b)
    assert comparison.first is None
    assert "loss" not in {finding.phase for finding in comparison.not_finite}  # `record_call` records no loss
    (line,) = (line for line in lines(comparison) if line.startswith("NaN or infinite in both recordings"))
    assert "the first: step 1: output of the model" in line
    rows = json.loads(write_results(comparison, tmp_path)[1].read_text())["findings"]
    assert any(row["not_finite_on_both_sides"] for row in rows)
    assert not compare_recordings(a, recording(Net())).not_finite


def test_infinity_does_not_hide_how_far_rounding_moves_the_rest() -> None:
    record = recording(Net(bad=float("inf"))).ranks[0]
    entry = next(e for e in record.entries if e.moment == "output_gradient" and e.name == "norm")
    assert entry.not_finite
    for entry in record.entries:
        assert entry.moved_rms is None or 0 <= entry.moved_rms < 1e30


def test_runs_and_recordings_hold_the_type_that_computed(tmp_path: Path) -> None:
    """The type of `compute: auto` is that of the device of the run, wherever the run is read."""
    write_chat_set(tmp_path / "data")
    recipe = chat_recipe(tmp_path / "data", tmp_path / "runs", steps=1)
    recipe["data"]["eval"], recipe["precision"] = [], {"weights": "bfloat16", "compute": "auto"}
    with contextlib.redirect_stderr(io.StringIO()):
        train(recipe, callbacks=[RecordSteps(tmp_path / "recording", rounding=0)])
    assert read_recording(tmp_path / "recording").compute == "BF16"
    assert yaml.safe_load((tmp_path / "runs/chat/config.yaml").read_text())["precision"]["compute"] == "bfloat16"


# ---------------------------------------------------------------------------------------------- later steps


def add(record: RankRecord, step: int, moment: Moment, name: str, tensor: Tensor, moved: float = 0.0) -> None:
    key = str(len(record.tensors))
    entry = TensorEntry(step, moment, name, "F32", list(tensor.shape), float(len(record.entries)), key=key)
    entry.moved_max, entry.moved_rms = moved, moved
    record.entries.append(entry)
    record.tensors[key] = tensor


def test_an_update_remembers_gradients_of_earlier_steps() -> None:
    """Momentum has the sign of a gradient that was rounding in the step before."""
    gradient = torch.linspace(1.0, 2.0, 20)
    sides = []
    for sign, fault in ((1, 0.0), (-1, 0.0), (1, 1e-3)):
        record, before = RankRecord(0), gradient.clone()
        before[7] = sign * 1e-9
        for step, current in ((1, before), (2, gradient)):
            update = -0.01 * before.sign()
            update[3] += fault if step == 2 else 0.0
            add(record, step, "gradient", "layer.weight", current)
            add(record, step, "update", "layer.weight", update)
        sides.append(Recording("steps", [record]))
    assert compare_recordings(sides[0], sides[1]).first is None
    finding = compare_recordings(sides[0], sides[2]).first
    assert finding is not None
    assert (finding.step, finding.phase) == (2, "update")


def test_the_output_of_a_module_may_differ_as_far_as_its_own_weights() -> None:
    """Weights of one small module have moved apart by 400 roundings, those of a large one not at all."""
    large, small, eps = torch.ones(1000, 10), torch.ones(10), torch.finfo(torch.float32).eps
    sides = []
    for apart, fault in ((0.0, 0.0), (400 * eps, 0.0), (0.0, 1e-4)):
        record = RankRecord(0)
        add(record, 1, "weight", "small.weight", small)
        add(record, 2, "weight", "large.weight", large)
        add(record, 2, "weight", "small.weight", small + apart)
        add(record, 2, "output", "large", large + fault, moved=eps)
        add(record, 2, "output", "small", small * (1 + apart), moved=eps)
        sides.append(Recording("steps", [record]))
    for side in sides:  # the update of the first step explains how far the weights are apart
        weight = next(e for e in side.ranks[0].entries if (e.step, e.moment, e.name) == (2, "weight", "small.weight"))
        assert weight.key is not None
        add(side.ranks[0], 1, "update", "small.weight", side.ranks[0].tensors[weight.key] - small, moved=1.0)
    assert compare_recordings(sides[0], sides[1]).first is None
    finding = compare_recordings(sides[0], sides[2]).first
    assert finding is not None
    assert (finding.phase, finding.name) == ("output", "large")


# ---------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("limit", [0, 1000, 20_000, 100_000])
def test_the_stored_tensors_stay_below_their_limit(limit: int, tmp_path: Path) -> None:
    folder = write_recording(recording(Net(), Budget(bytes=limit)), tmp_path / "recording")
    stored = folder / "rank-0.safetensors"
    header = int.from_bytes(stored.read_bytes()[:8], "little") + 8
    assert stored.stat().st_size - header <= limit
    assert compare_recordings(recording(Net()), read_recording(folder)).first is None


@contextlib.contextmanager
def small_files(limit: int) -> Iterator[None]:
    """Let writes fail beyond a size, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("limit", [100, 12_000])
def test_a_full_disk_leaves_nothing(limit: int, tmp_path: Path) -> None:
    """The first limit stops the JSON file, the second one the tensors."""
    complete = recording(Net())
    if limit > 100:
        complete.ranks[0].entries = complete.ranks[0].entries[:4]
    with small_files(limit), raises("parity.recording-not-writable"):
        write_recording(complete, tmp_path / "recording")
    assert list(tmp_path.iterdir()) == []
    comparison = compare_recordings(recording(Net()), recording(Net()))
    with small_files(100), raises("parity.results-not-writable"):
        write_results(comparison, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_place_of_the_parent_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with raises("parity.recording-not-writable"):
        write_recording(recording(Net()), tmp_path / "file" / "recording")


def test_two_recorders_do_not_share_a_folder(tmp_path: Path) -> None:
    complete, folder = recording(Net()), tmp_path / "recording"
    with claimed(folder):
        write_rank(complete.ranks[0], unfinished(folder))
        with raises("parity.folder-in-use"):
            write_recording(complete, folder)
        assert len(list(unfinished(folder).iterdir())) == 2, "the refused process removes nothing"
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_leaves_is_no_recording(tmp_path: Path) -> None:
    complete, folder = recording(Net()), tmp_path / "recording"
    write_rank(complete.ranks[0], unfinished(folder))
    (unfinished(folder) / "rank-7.json").write_text("{")
    for path in (folder, unfinished(folder)):
        with raises("parity.no-recording"):
            read_recording(path)
    write_recording(complete, folder)
    assert {path.name for path in folder.iterdir()} == {"recording.json", "rank-0.json", "rank-0.safetensors"}
    assert [path.name for path in tmp_path.iterdir()] == ["recording"]


# ---------------------------------------------------------------------------------------------- commits


@pytest.mark.slow
def test_a_search_that_is_terminated_leaves_no_worktree(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        done = subprocess.run(["git", *identity, "-C", str(tmp_path), *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    git("init", "-q")
    for number in range(2):
        git("commit", "-q", "--allow-empty", "-m", str(number))
    started = tmp_path / "started"
    command = f"{sys.executable} -c 'import pathlib, time; pathlib.Path(\"{started}\").touch(); time.sleep(60)' {{out}}"
    call = f"first_commit('HEAD~1', 'HEAD', {command!r}, {str(tmp_path)!r})"
    code = f"from tessera.tools.parity.bisect import first_commit; {call}"
    search = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(tmp_path)})
    try:
        deadline = time.monotonic() + 120
        while not started.exists():
            assert time.monotonic() < deadline
            assert search.poll() is None
            time.sleep(0.05)
        assert len(git("worktree", "list").splitlines()) == 2
        search.send_signal(signal.SIGTERM)
        assert search.wait(timeout=60) == 128 + signal.SIGTERM
    finally:
        search.kill()
        search.wait()
    assert len(git("worktree", "list").splitlines()) == 1
    assert not list(tmp_path.glob("tessera-bisect-*"))
