"""Record the sessions of a run, and write its report when it ends or fails."""

from __future__ import annotations

import logging
import platform
import time
from pathlib import Path

import torch

from tessera.core.callback import Callback, StepResult, TrainerHandle
from tessera.errors import first_line
from tessera.observe.report.history import History
from tessera.observe.report.page import write_report
from tessera.runtime import device as devices
from tessera.runtime.process import usable_cpus

ALIVE_S = 60.0  # seconds between two rows of `history.jsonl` during training

log = logging.getLogger("tessera")


class SessionHistory(Callback):
    """Record start, steps and failure of a session in `history.jsonl`, and write the report of a run that failed.

    It is the first callback, so its `on_error` is called last, when the other callbacks have closed their files.
    """

    def __init__(self) -> None:
        self._history: History | None = None  # set only on the main rank, while the session runs
        self._folder = Path()
        self._due = 0.0

    def on_start(self, trainer: TrainerHandle) -> None:
        if trainer.world.is_main:
            self._folder = trainer.config.folder
            self._history = History(self._folder)
            self._history.started(trainer.step, hardware_name(trainer.world.device), trainer.world.size)
            self._due = time.monotonic() + ALIVE_S

    def on_step_end(self, trainer: TrainerHandle, result: StepResult) -> None:
        if self._history is not None and time.monotonic() >= self._due:
            self._due = time.monotonic() + ALIVE_S
            self._history.alive(result.step)

    def on_error(self, trainer: TrainerHandle, error: BaseException) -> None:
        self.end(trainer.step, "failed", f"{type(error).__name__}: {error}")

    def end(self, step: int, how: str, reason: str | None = None) -> None:
        """Record the end of the session and write the report. An error here is logged and does not end the run."""
        if self._history is None:
            return
        self._history.ended(step, how, reason)
        self._history = None
        try:
            write_report(self._folder)
        except Exception as error:
            log.warning("report.html was not written: %s", first_line(error))


class Report(Callback):
    """Write the report when the run ends, after the callbacks before it have written their files."""

    def __init__(self, history: SessionHistory) -> None:
        self._history = history

    def on_end(self, trainer: TrainerHandle) -> None:
        stopped = trainer.stop_reason
        self._history.end(trainer.step, "finished" if stopped is None else "stopped", stopped)


def hardware_name(device: torch.device) -> str:
    """Return the name of a device; for a CPU with the number of cores."""
    name = devices.name(device)
    return f"CPU ({platform.machine()}), {usable_cpus():g} cores" if name == "CPU" else name
