"""SIGTERM and SIGINT: finish the step, save, leave with the work kept. A second SIGINT ends at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import TYPE_CHECKING, Any

from tessera.train.callbacks import Callback

if TYPE_CHECKING:
    from tessera.train.trainer import Trainer


class StopOnSignal(Callback):
    def __init__(self) -> None:
        self._before: dict[int, Any] = {}

    def on_start(self, trainer: Trainer) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread may set handlers; a caller that trains elsewhere handles signals itself

        def handle(number: int, frame: FrameType | None) -> None:
            if number == signal.SIGINT and trainer.stop_reason is not None:
                raise KeyboardInterrupt
            trainer.request_stop(signal.Signals(number).name)

        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, handle)

    def on_end(self, trainer: Trainer) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def on_error(self, trainer: Trainer, error: BaseException) -> None:
        self.on_end(trainer)
