"""Stop a run on signals: it prints an answer at once, finishes the step and saves."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from types import FrameType
from typing import Any

from tessera.core.callback import Callback, TrainerHandle
from tessera.runtime.launcher import outlive_launcher
from tessera.runtime.log import is_terminal

FIRST = "stopping after this step, then saving; Ctrl-C again to stop now, without saving"
SECOND = "stopping now; what came after the newest checkpoint is not saved"


class StopOnSignal(Callback):
    """Stop after the current step and save, on SIGTERM and SIGINT. A second SIGINT ends the process at once."""

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._answers: _Answers | None = None

    def on_start(self, trainer: TrainerHandle) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # Python lets only the main thread set handlers

        def handle(number: int, frame: FrameType | None) -> None:
            # Python handles two signals as one if both arrive during one operation.
            twice = self._answers is not None and self._answers.interrupts > 1
            if number == signal.SIGINT and (twice or trainer.stop_reason is not None):
                raise KeyboardInterrupt
            outlive_launcher()
            trainer.request_stop(signal.Signals(number).name)

        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, handle)
        if trainer.world.is_main:
            self._answers = _Answers()

    def on_end(self, trainer: TrainerHandle) -> None:
        if self._answers is not None:
            self._answers.close()
            self._answers = None
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def on_error(self, trainer: TrainerHandle, error: BaseException) -> None:
        self.on_end(trainer)


class _Answers:
    """Answer Ctrl-C from a thread: the handler of the main thread waits until the current operation returns."""

    def __init__(self) -> None:
        self.interrupts = 0
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._fd_before = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._run, name="tessera-signals", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while numbers := self._read.recv(64):
            for number in numbers:
                if number == signal.SIGINT:
                    self.interrupts += 1
                    _say(FIRST if self.interrupts == 1 else SECOND)
                elif number == 0:
                    return

    def close(self) -> None:
        signal.set_wakeup_fd(self._fd_before)
        self._write.send(b"\0")
        self._thread.join()
        self._read.close()
        self._write.close()


def _say(words: str) -> None:
    """Write a line to stderr past Python's buffers, which the interrupted thread may hold."""
    clear = "\r\x1b[K" if is_terminal(sys.stderr) else ""
    os.write(2, f"{clear}{words}\n".encode())
