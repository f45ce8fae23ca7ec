"""Callbacks that tests put into runs."""

from __future__ import annotations

from typing import Any

from tessera.core.callback import Callback, StepResult


class StopAt(Callback):
    """Asks the run to stop after a step, as a signal would."""

    def __init__(self, step: int) -> None:
        self.at = step

    def on_step_end(self, trainer: Any, result: StepResult) -> None:
        if result.step == self.at:
            trainer.request_stop("test")
