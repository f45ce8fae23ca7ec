"""Ctrl-C is answered at once; the step is finished and saved, and a second one ends the run."""

from __future__ import annotations

import hashlib
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
from tessera.training.signals import FIRST, SECOND
from tests.toys.chat_set import chat_recipe, write_chat_set


class Press(Callback):
    """Press Ctrl-C in the second step, so many times, while one long operation is computed."""

    def __init__(self, times: int, capture: pytest.CaptureFixture[str]) -> None:
        self.times, self.capture = times, capture
        self.answers = ""

    def on_step_begin(self, trainer: Any) -> None:
        if trainer.step != 1:
            return
        waiting = threading.Event()

        def press() -> None:
            for _ in range(self.times):
                os.kill(os.getpid(), signal.SIGINT)
                waiting.wait(0.05)
            self.answers = self.capture.readouterr().err  # the operation still runs

        pressing = threading.Thread(target=press)
        pressing.start()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 600_000)  # one call: no handler of Python's runs before it returns
        pressing.join()


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    settings = chat_recipe(write_chat_set(tmp_path / "chat", samples=4), tmp_path, steps=50, global_batch=1)
    settings["data"]["eval"] = []
    return settings | {"checkpoint": {"every": 0}, "guard": {"coverage": "off"}}


def test_ctrl_c_is_answered_before_the_step_ends_and_the_step_is_saved(
    recipe: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGINT)
    signal.set_wakeup_fd(-1)
    press = Press(1, capfd)
    run = tessera.train(recipe, callbacks=[press])
    assert FIRST in press.answers
    assert run.stopped == "SIGINT"
    assert run.checkpoint is not None
    assert run.checkpoint.name == "step-00000002"
    assert signal.getsignal(signal.SIGINT) is before
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.slow
def test_a_second_ctrl_c_ends_the_run_without_a_save(recipe: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    class Twice(Press):
        def on_step_begin(self, trainer: Any) -> None:
            super().on_step_begin(trainer)
            if trainer.stop_reason is not None:
                signal.raise_signal(signal.SIGINT)

    press = Twice(1, capfd)
    with pytest.raises(KeyboardInterrupt):
        tessera.train(recipe, callbacks=[press])
    assert SECOND in press.answers + capfd.readouterr().err
    assert not list(Path(recipe["out"]).glob("chat/checkpoints/step-*"))
    assert signal.set_wakeup_fd(-1) == -1


def test_a_stop_does_not_wait_for_data_that_does_not_come(
    recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever stops a run gives it seconds, and a hub that does not answer may take minutes."""
    read, taken = Loader._step, []

    def stuck(loader: Loader) -> Any:
        taken.append(time.perf_counter())
        if len(taken) == 3:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
            time.sleep(60)
        return read(loader)

    monkeypatch.setattr(Loader, "_step", stuck)
    run = tessera.train(recipe)
    assert time.perf_counter() - taken[-1] < 30
    assert run.stopped == "SIGTERM"
    assert run.checkpoint is not None
    assert run.checkpoint.name == "step-00000002"
    monkeypatch.undo()
    assert tessera.resume(run.folder, {"train.steps": 4}).stopped is None
