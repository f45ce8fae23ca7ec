"""Ctrl-C is answered; the step is finished and saved, and a second one ends the run."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import tessera
from tessera.core.callback import Callback
from tessera.data.loader.loader import Loader
from tessera.training.signals import FIRST, SECOND, UNSAVED
from tests.toys.chat_set import chat_recipe, write_chat_set


class Press(Callback):
    """Press Ctrl-C in the second step, so many times."""

    def __init__(self, times: int) -> None:
        self.times = times

    def on_step_begin(self, trainer: Any) -> None:
        if trainer.step == 1:
            for _ in range(self.times):
                signal.raise_signal(signal.SIGINT)


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    settings = chat_recipe(write_chat_set(tmp_path / "chat", samples=4), tmp_path, steps=50, global_batch=1)
    settings["data"]["eval"] = []
    return settings | {"checkpoint": {"every": 0}, "guard": {"coverage": "off"}}


def test_ctrl_c_is_answered_and_the_step_is_saved(recipe: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    run = tessera.train(recipe, callbacks=[Press(1)])
    assert FIRST in capfd.readouterr().err
    assert run.stopped == "SIGINT"
    assert run.checkpoint is not None
    assert run.checkpoint.name == "step-00000002"
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_does_not_promise_a_save_that_is_off(recipe: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    recipe["checkpoint"] |= {"at_end": False}
    run = tessera.train(recipe, callbacks=[Press(1)])
    assert run.checkpoint is None
    printed = capfd.readouterr().err
    assert UNSAVED in printed
    assert FIRST not in printed


def test_a_second_ctrl_c_ends_the_run_without_a_save(recipe: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        tessera.train(recipe, callbacks=[Press(2)])
    assert SECOND in capfd.readouterr().err
    assert not list(Path(recipe["out"]).glob("chat/checkpoints/step-*"))


def test_a_stop_does_not_wait_for_data_that_does_not_come(
    recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever stops a run gives it seconds, and a hub that does not answer may take minutes."""
    read, taken, released = Loader._step, [], threading.Event()

    def stuck(loader: Loader) -> Any:
        taken.append(time.perf_counter())
        if len(taken) == 3:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
            released.wait(600)
        return read(loader)

    monkeypatch.setattr(Loader, "_step", stuck)
    run = tessera.train(recipe)
    assert time.perf_counter() - taken[-1] < 300
    released.set()
    assert run.stopped == "SIGTERM"
    assert run.checkpoint is not None
    assert run.checkpoint.name == "step-00000002"
    monkeypatch.undo()
    assert tessera.resume(run.folder, {"train.steps": 4}).stopped is None
