"""Stop a run on signals: it answers at once, finishes the step and saves."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

from tessera.core.batch import Batch
from tessera.core.callback import Callback, TrainerHandle, WaitEnded
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
            return  # only the main thread may set handlers; a caller that trains elsewhere handles signals itself

        def handle(number: int, frame: FrameType | None) -> None:
            # Two that come while an operation computes are handled as one.
            twice = self._answers is not None and self._answers.asked > 1
            if number == signal.SIGINT and (twice or trainer.stop_reason is not None):
                raise KeyboardInterrupt
            outlive_launcher()
            trainer.request_stop(signal.Signals(number).name)
            if trainer.awaits_data:
                trainer.awaits_data = False
                raise WaitEnded

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


def next_unless_stopped(trainer: TrainerHandle) -> Sequence[Batch] | None:
    """Return the micro-batches of the next step, or None where a stop is asked for while this rank waits for them.

    Data may be minutes away (a hub that does not answer), and whoever stops a run gives it seconds. Ranks agree on a
    step when they have its data, so one that gives up waiting leaves no other rank in the middle of a step.
    """
    try:
        trainer.awaits_data = True
        if trainer.stop_reason is not None:
            return None
        microbatches: Sequence[Batch] = next(trainer.loader)
        trainer.awaits_data = False
    except WaitEnded:
        return None
    finally:
        trainer.awaits_data = False
    return microbatches


class _Answers:
    """Answer Ctrl-C from a thread of its own: the handler runs only when the operation that is computed returns."""

    def __init__(self) -> None:
        self.asked = 0
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._fd_before = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._run, name="tessera-signals", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while numbers := self._read.recv(64):
            for number in numbers:
                if number == signal.SIGINT:
                    self.asked += 1
                    _say(FIRST if self.asked == 1 else SECOND)
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
