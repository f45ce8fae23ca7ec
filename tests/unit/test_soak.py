"""A long run stays as it began: memory flat, no file handles growing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tessera.core.callback import Callback, StepResult
from tessera.runtime import device as devices
from tessera.training.run import train
from tests.toys.chat_set import chat_recipe, write_chat_set


class Watch(Callback):
    def __init__(self) -> None:
        self.memory: list[int] = []
        self.handles: list[int] = []

    def on_step_end(self, trainer: Any, result: StepResult) -> None:
        if result.step % 8 == 0:
            self.memory.append(devices.memory(torch.device("cpu")).used)
            self.handles.append(len(os.listdir("/proc/self/fd")))


def soak(tmp_path: Path, steps: int, workers: int, quickstart: bool) -> Watch:
    recipe = chat_recipe(write_chat_set(tmp_path / "data"), tmp_path / "runs", steps=steps, global_batch=1)
    if quickstart:
        recipe["model"]["config"] = {}
    recipe["data"]["workers"] = workers
    recipe["checkpoint"] = {"every": steps // 8}
    recipe["log"]["every"] = 25
    watch = Watch()
    train(recipe, callbacks=[watch])
    return watch


def check(watch: Watch) -> None:
    half = len(watch.memory) // 2
    early, late = max(watch.memory[2:half]), max(watch.memory[half:])
    print(f"memory {early / 2**20:.1f} -> {late / 2**20:.1f} MiB, handles {watch.handles[2]} -> {watch.handles[-1]}")
    assert late - early < 8 * 2**20, f"{early} -> {late}"
    assert max(watch.handles[half:]) <= max(watch.handles[2:half])


@pytest.mark.slow
def test_a_short_soak(tmp_path: Path) -> None:
    check(soak(tmp_path, 128, workers=1, quickstart=False))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_a_thousand_steps_of_the_quickstart_model(tmp_path: Path, workers: int) -> None:
    check(soak(tmp_path, 1000, workers, quickstart=True))
