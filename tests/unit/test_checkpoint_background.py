"""Saves in the background: training goes on, and what is written is the state at the moment of the save."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from test_checkpoint_manager import blank, in_child, same_bits, save, tensors
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import tessera
from tessera.checkpoint.manager import CheckpointManager
from tessera.config.run_config import CheckpointSection
from tessera.core.callback import Callback
from tessera.training.saves import Saved, Saves
from tests.errors import raises
from tests.toys.chat_set import chat_recipe, write_chat_set


def full_disk(at: str, times: int = 10**6) -> Callable[[str], None]:
    """Return a fault that fails writes whose point begins with `at`, as often as given."""
    remaining = [times]

    def fault(point: str) -> None:
        if point.startswith(at) and remaining[0]:
            remaining[0] -= 1
            raise OSError(errno.EIO, "the disk is broken")

    return fault


def test_what_is_written_is_the_state_at_the_moment_of_the_save(tmp_path: Path) -> None:
    written = threading.Event()
    go_on = threading.Event()

    def slow(point: str) -> None:
        written.set()
        assert go_on.wait(60)

    manager = CheckpointManager(tmp_path, 2, fault=slow)
    live, state = tensors(3), {"losses": [1.0]}
    manager.save_in_background(3, live, state, "recipe\n")
    assert written.wait(60)
    assert manager.in_background
    assert manager.is_writing
    with torch.no_grad():
        for tensor in live.values():
            tensor.zero_()
    state["losses"].append(2.0)
    assert list(tmp_path.glob("step-*")) == []
    go_on.set()
    assert manager.finish_background() == tmp_path / "step-00000003"
    assert not manager.in_background
    assert manager.finish_background() is None
    assert manager.report is not None
    assert manager.report.paused_seconds < manager.report.seconds
    into = blank()
    assert CheckpointManager(tmp_path, 2).resume(into) == (3, {"losses": [1.0]})
    assert same_bits(into, tensors(3))


def test_a_prepared_save_does_not_plan_again_unless_the_tensors_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[int] = []
    original = DefaultSavePlanner.create_local_plan

    def counted(planner: DefaultSavePlanner) -> Any:
        plans.append(1)
        return original(planner)

    monkeypatch.setattr(DefaultSavePlanner, "create_local_plan", counted)
    manager = CheckpointManager(tmp_path, 3)
    manager.prepare(tensors(0))
    for step in (1, 2):  # other tensors of the same names: what is written is theirs
        manager.save_in_background(step, tensors(step), {}, "recipe\n")
        manager.finish_background()
        into = blank()
        assert CheckpointManager(tmp_path, 3).resume(into) == (step, {})
        assert same_bits(into, tensors(step))
    assert len(plans) == 1
    grown = {**tensors(3), "optim.extra": torch.ones(2)}
    manager.save_in_background(3, grown, {}, "recipe\n")
    manager.finish_background()
    into = {**blank(), "optim.extra": torch.zeros(2)}
    assert CheckpointManager(tmp_path, 3).resume(into) == (3, {})
    assert same_bits(into, grown)
    assert len(plans) == 2


@pytest.mark.parametrize(
    ("settings", "prepared"),
    [
        ({}, True),
        ({"every": 5}, True),
        ({"every": 5, "asynchronous": False}, False),
        ({"every": 0}, False),
        ({"at_end": False}, False),
    ],
)
def test_only_a_run_that_saves_on_its_way_prepares_for_it(settings: dict[str, Any], prepared: bool) -> None:
    manager = mock.Mock()
    saved: Saved = (1, {}, {}, "")
    saves = Saves(manager, CheckpointSection(**settings), lambda: saved, lambda _: nullcontext(), lambda _: None)
    saves.prepare(has_state=False)
    assert not manager.prepare.called
    saves.prepare(has_state=True)
    saves.prepare(has_state=True)
    assert manager.prepare.call_count == int(prepared)


def test_a_failed_write_is_raised_when_it_is_finished(tmp_path: Path) -> None:
    save(tmp_path, 1)
    manager = CheckpointManager(tmp_path, 2, fault=full_disk("write state.json", 1))
    manager.save_in_background(2, tensors(2), {}, "")
    with raises("output.write-failed"):
        manager.finish_background()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001"]
    manager.save_in_background(3, tensors(3), {}, "")
    assert manager.finish_background() == tmp_path / "step-00000003"


def test_without_memory_for_copies_the_save_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tessera.runtime.device.free_memory", lambda device: 0)
    manager = CheckpointManager(tmp_path, 2)
    manager.save_in_background(4, tensors(4), {}, "")
    assert not manager.is_writing
    assert (tmp_path / "step-00000004").is_dir()
    assert manager.finish_background() == tmp_path / "step-00000004"
    assert "training waits for this save" in caplog.text


def test_device_memory_that_cannot_be_had_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(tensor: Any) -> None:
        raise torch.OutOfMemoryError("no block is large enough")

    manager, live = CheckpointManager(tmp_path, 2), tensors(5)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "clone", refuse)
        manager.save_in_background(5, live, {}, "")
    with torch.no_grad():
        live["model.weight"].zero_()
    manager.finish_background()
    into = blank()
    assert CheckpointManager(tmp_path, 2).resume(into) == (5, {})
    assert same_bits(into, tensors(5))


def save_in_background_and_die(folder: Path, number: int) -> None:
    """Killed at this point of the write."""
    remaining = iter(range(number, -1, -1))

    def die(point: str) -> None:
        if next(remaining) == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    manager = CheckpointManager(folder, 2, fault=die)
    manager.save_in_background(2, tensors(2), {}, "")
    manager.finish_background()


@pytest.mark.parametrize("every", [9, pytest.param(3, marks=pytest.mark.slow)])
def test_a_kill_at_any_point_of_the_write_loses_that_save_alone(every: int, tmp_path: Path) -> None:
    points: list[str] = []
    CheckpointManager(tmp_path / "points", 2, fault=points.append).save(2, tensors(2), {}, "")
    assert len(points) > 20
    for number in range(0, len(points), every):
        folder = tmp_path / str(number)
        save(folder, 1)
        assert in_child(save_in_background_and_die, folder, number) == -signal.SIGKILL
        into = blank()
        resumed = CheckpointManager(folder, 2).resume(into)
        assert resumed is not None
        assert same_bits(into, tensors(resumed[0])), points[number]
        assert resumed[0] == (1 if number <= points.index("rename .staging-step-00000002") else 2)


# ---------------------------------------------------------------------------------------------- whole runs


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_set(tmp_path_factory.mktemp("chat"), samples=8)


def recipe(data: Path, folder: Path, **checkpoint: Any) -> dict[str, Any]:
    settings = chat_recipe(data, folder, steps=4, global_batch=2)
    settings["data"]["eval"] = []
    return settings | {"checkpoint": {"every": 1, "keep": 9, **checkpoint}}


def weights(run: Any, step: int) -> bytes:
    folder = run.folder / "checkpoints" / f"step-{step:08d}"
    return b"".join(path.read_bytes() for path in sorted(folder.glob("*.safetensors")))


def curve(run: Any) -> list[float]:
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if row["kind"] == "train"]


def test_a_run_is_the_same_with_saves_in_the_background(data: Path, tmp_path: Path) -> None:
    behind = tessera.train(recipe(data, tmp_path / "a"))
    waiting = tessera.train(recipe(data, tmp_path / "b", asynchronous=False))
    assert curve(behind) == curve(waiting)
    for step in (1, 2, 3, 4):
        assert weights(behind, step) == weights(waiting, step)


def test_training_goes_on_while_a_save_is_written(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, seen = threading.Event(), []

    def slow(point: str) -> None:
        assert go_on.wait(120)

    class Watch(Callback):
        def on_step_end(self, trainer: Any, result: Any) -> None:
            if result.step == 3:
                seen.append(trainer.checkpoints.is_writing)
                go_on.set()

    monkeypatch.setattr("tessera.training.build.CheckpointManager", partial(CheckpointManager, fault=slow))
    run = tessera.train(recipe(data, tmp_path, every="1e-9min"), callbacks=[Watch()])
    assert seen == [True]
    assert run.checkpoint is not None
    assert run.checkpoint.name == "step-00000004"


@pytest.mark.slow
def test_a_failed_save_ends_the_run_only_at_its_end(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    once = partial(CheckpointManager, fault=full_disk("write state.json", 1))
    monkeypatch.setattr("tessera.training.build.CheckpointManager", once)
    with caplog.at_level(logging.ERROR):
        run = tessera.train(recipe(data, tmp_path / "a"))
    saved = sorted(path.name for path in (run.folder / "checkpoints").glob("step-*"))
    assert saved == ["step-00000002", "step-00000003", "step-00000004"]
    always = partial(CheckpointManager, fault=full_disk("write state.json"))
    monkeypatch.setattr("tessera.training.build.CheckpointManager", always)
    with raises("output.write-failed"):
        tessera.train(recipe(data, tmp_path / "b"))


@pytest.mark.slow
def test_weights_alone_can_be_loaded_and_trained_from_and_not_resumed(data: Path, tmp_path: Path) -> None:
    run = tessera.train(recipe(data, tmp_path / "a", weights_only=True))
    assert run.checkpoint is not None
    stored = json.loads((run.checkpoint / "tensors.json").read_text())["tensors"]
    assert stored
    assert all(name.startswith("model.") for name in stored)
    model, _ = tessera.load(run.folder, device="cpu")
    name, parameter = next(iter(model.module.named_parameters()))
    assert list(parameter.shape) == stored[f"model.{name}"]["shape"]
    with raises("checkpoint.weights-only"):
        tessera.resume(run.folder, {"train.steps": 6})
    following = recipe(data, tmp_path / "b", at_end=False, every=0)
    following["model"] = {"path": str(run.checkpoint)}
    assert len(curve(tessera.train(following))) == 4
