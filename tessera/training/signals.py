"""Stop a run on signals: it finishes the step, and saves unless `checkpoint.at_end` is off."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

from tessera.core.callback import Callback, TrainerHandle
from tessera.runtime.launcher import outlive_launcher
from tessera.runtime.log import is_terminal

FIRST = "stopping after this step, then saving; Ctrl-C again to stop now, without saving"
UNSAVED = "stopping after this step, without saving (checkpoint.at_end is off); Ctrl-C again to stop now"
SECOND = "stopping now; what came after the newest checkpoint is not saved"


class StopOnSignal(Callback):
    """Stop after the current step and save, on SIGTERM and SIGINT. A second SIGINT ends the process at once."""

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}

    def on_start(self, trainer: TrainerHandle) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # Python allows only the main thread to set signal handlers: signals do not stop such a run

        def handle(number: int, frame: FrameType | None) -> None:
            again = trainer.stop_reason is not None
            if number == signal.SIGINT and trainer.world.is_main:
                _write_line(SECOND if again else FIRST if trainer.config.checkpoint.at_end else UNSAVED)
            if number == signal.SIGINT and again:
                raise KeyboardInterrupt
            outlive_launcher()
            trainer.request_stop(signal.Signals(number).name)

        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, handle)

    def on_end(self, trainer: TrainerHandle) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def on_error(self, trainer: TrainerHandle, error: BaseException) -> None:
        self.on_end(trainer)


def _write_line(text: str) -> None:
    """Write a line to stderr without Python's buffers, which the interrupted code may be using."""
    clear = "\r\x1b[K" if is_terminal(sys.stderr) else ""
    os.write(2, f"{clear}{text}\n".encode())
