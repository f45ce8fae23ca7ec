"""Draw the report while the run goes on, when it ends and when it fails.

While steps run, another process draws, because a page takes a second of work. It is started at most once a minute and
runs at the lowest priority. No step waits for it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch

from tessera.core.callback import Callback, StepResult, TrainerHandle
from tessera.errors import first_line
from tessera.observe.report.history import History
from tessera.observe.report.page import REPORT, fresh_page, write_report
from tessera.runtime import device as devices
from tessera.runtime.process import usable_cpus

FIRST_S = 15.0  # after the start; a shorter run draws when it ends
EVERY_S = 60.0
_BEGIN = (
    "import os, sys; os.nice(19); sys.path[:] = {path!r}\n"
    "from tessera.observe.report.page import write_report; write_report({folder!r})"
)
# The process needs no device.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}

log = logging.getLogger("tessera")


class LiveReport(Callback):
    """Keep the history of the run, and draw while it goes on and when it fails.

    It is the first callback, and so the last one whose `on_error` is called: the other records are complete by then.
    """

    def __init__(self, first_s: float = FIRST_S, every_s: float = EVERY_S) -> None:
        self._first_s, self._every_s = first_s, every_s
        self._due = 0.0
        self._drawing: subprocess.Popen[bytes] | None = None
        self._folder = Path()
        self.history: History | None = None  # of the main rank, from the start on

    def on_start(self, trainer: TrainerHandle) -> None:
        if trainer.world.is_main:
            self._folder = trainer.config.folder
            self.history = History(self._folder)
            self.history.started(trainer.step, hardware_name(trainer.world.device), trainer.world.size)
            self._due = time.monotonic() + self._first_s

    def on_step_end(self, trainer: TrainerHandle, result: StepResult) -> None:
        if self.history is not None and time.monotonic() >= self._due:
            self._due = time.monotonic() + self._every_s
            self.history.alive(result.step)
            self._draw()

    def on_error(self, trainer: TrainerHandle, error: BaseException) -> None:
        self.end(trainer.step, "failed", f"{type(error).__name__}: {error}")

    def end(self, step: int, how: str, reason: str | None = None) -> None:
        """Write the end of the run, and draw for the last time. An error here is logged and does not end the run."""
        if self.history is None:
            return
        self._stop_drawing()
        self.history.ended(step, how, reason)
        self.history = None
        try:
            write_report(self._folder)
        except Exception as error:
            log.warning("report.html was not written: %s", first_line(error))

    def _draw(self) -> None:
        if self._drawing is not None and self._drawing.poll() is None:
            return
        begin = _BEGIN.format(path=list(sys.path), folder=str(self._folder.absolute()))
        try:
            # In a new session, so that Ctrl-C in the terminal does not reach it.
            self._drawing = subprocess.Popen(
                [sys.executable, "-c", begin],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **_ENVIRONMENT},
                start_new_session=True,
            )
        except OSError as error:
            log.debug("no process draws the report: %s", error)

    def _stop_drawing(self) -> None:
        if self._drawing is None:
            return
        self._drawing.kill()
        self._drawing.wait()
        with contextlib.suppress(OSError):
            fresh_page(self._folder / REPORT, self._drawing.pid).unlink(missing_ok=True)
        self._drawing = None


def hardware_name(device: torch.device) -> str:
    """Return the name of a device, and the number of cores of a CPU."""
    name = devices.name(device)
    return f"{_processor()}, {usable_cpus():g} cores" if name == "CPU" else name


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or f"CPU ({platform.machine()})"


class Report(Callback):
    """Draw the report when the run ends, after other callbacks have written their last lines."""

    def __init__(self, live: LiveReport) -> None:
        self._live = live

    def on_end(self, trainer: TrainerHandle) -> None:
        stopped = trainer.stop_reason
        self._live.end(trainer.step, "finished" if stopped is None else "stopped", stopped)
