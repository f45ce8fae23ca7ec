"""Launchers as people start them: two of them on one machine over loopback, and one whose rank is killed on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tessera.runtime.distributed import free_port
from tessera.runtime.process import Process

ROOT = Path(__file__).parents[2]


def recipe(folder: Path, **train: Any) -> Path:
    content = {
        "name": "denoise",
        "out": str(folder / "runs"),
        "model": {"family": "tests.toys.denoiser", "preset": "tiny"},
        "data": {"kind": "tests.toys.digit_pictures"},
        "train": {"steps": 6, "global_batch": 4, "device": "cpu", **train},
        "checkpoint": {"every": 2},
        "log": {"every": 1},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def start(*words: object, module: str = "tessera.cli.main") -> subprocess.Popen[str]:
    command = [sys.executable, "-m", module, *map(str, words)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str], timeout: float = 100) -> str:
    try:
        said, _ = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            process.terminate()
    return said


def ranks_of(launcher: subprocess.Popen[str]) -> list[int]:
    """Processes that the launcher started for the run, in order of rank."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    lines = {int(child): Path(f"/proc/{child}/cmdline").read_bytes() for child in children}
    return sorted(pid for pid, line in lines.items() if b"tessera.cli.main" in line)


def losses(folder: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if row["kind"] == "train"}


@pytest.mark.slow
def test_two_machines_with_fixed_numbers_train_one_run(tmp_path: Path) -> None:
    path = recipe(tmp_path)
    place = f"127.0.0.1:{free_port()}"
    nodes = [start("train", path, "--nnodes", 2, "--node-rank", rank, "--master", place) for rank in range(2)]
    said = [finish(node) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert "2 = 1 replicated x 2 sharded" in said[0]
    assert sorted(losses(tmp_path / "runs/denoise")) == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow  # 75 s; that a run goes on after a kill is in test_kill, what the launcher starts in the tests around
def test_a_killed_rank_is_started_again_and_the_run_goes_on(tmp_path: Path) -> None:
    steps = 60
    path = recipe(tmp_path, steps=steps)
    place = f"127.0.0.1:{free_port()}"
    words = ["--nproc", 2, "--nnodes", "1:2", "--rdzv", place, "--restarts", 2]
    launcher = start("train", path, "checkpoint.every=10", "checkpoint.keep=100", *words)
    folder = tmp_path / "runs/denoise"
    try:
        while not list(folder.glob("checkpoints/step-*")):
            assert launcher.poll() is None
            time.sleep(0.02)
        os.kill(ranks_of(launcher)[-1], signal.SIGKILL)
    finally:
        said = finish(launcher)
    assert launcher.returncode == 0, said
    assert "died" in said
    assert "resumed from" in said
    assert sorted(losses(folder)) == list(range(1, steps + 1))


def await_ranks(launcher: subprocess.Popen[str], count: int) -> list[Process]:
    """Return the processes of the ranks as soon as all have been started."""
    while len(ranks := ranks_of(launcher)) < count:
        assert launcher.poll() is None
        time.sleep(0.01)
    return [Process.of(pid) for pid in ranks]


def have_ended(processes: list[Process], patience: float = 60) -> bool:
    """Wait for the end of processes. On a quiet machine ranks of a killed launcher take less than a second."""
    deadline = time.monotonic() + patience
    while any(process.alive() for process in processes) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(process.alive() for process in processes)


@pytest.mark.slow
def test_ranks_of_a_killed_launcher_end_while_they_start(tmp_path: Path) -> None:
    launcher = start("train", recipe(tmp_path), "--nproc", 2)
    ranks = await_ranks(launcher, 2)
    launcher.kill()
    assert have_ended(ranks)
    assert "the launcher (process" in finish(launcher)


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["tessera", "torchrun"])
def test_a_run_whose_launcher_was_killed_goes_on_at_once(agent: str, tmp_path: Path) -> None:
    path, folder, steps = recipe(tmp_path, steps=400), tmp_path / "runs/denoise", ["checkpoint.keep=1000"]
    if agent == "tessera":
        launcher = start("train", path, *steps, "--nproc", 2)
    else:
        words = ["--nproc-per-node=2", "-m", "tessera.cli.main", "train", path, *steps]
        launcher = start(*words, module="torch.distributed.run")
    ranks = await_ranks(launcher, 2)
    while not list(folder.glob("checkpoints/step-*")):
        assert launcher.poll() is None
        time.sleep(0.02)
    launcher.kill()
    again = start("train", path, *steps, "train.steps=12", "--nproc", 2, "--or-resume")  # the lock is still held
    assert have_ended(ranks)
    assert "the launcher (process" in finish(launcher)
    assert again.poll() is None
    said = finish(again)
    assert again.returncode == 0, said
    assert "resumed from" in said
