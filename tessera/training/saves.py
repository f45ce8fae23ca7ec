"""Decide when a run saves, and how long it waits for a save."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor

from tessera.checkpoint.manager import CheckpointManager
from tessera.config.run_config import CheckpointSection
from tessera.runtime import log

_WAIT_AFTER_ERROR_S = 10.0  # for a checkpoint that is written together with other ranks

# What is saved of a step: its number, tensors by name, the rest of the state, and the recipe.
Saved = tuple[int, dict[str, Tensor], dict[str, Any], str]


class Saves:
    """Begin, finish and time the saves of one run. All methods but `due` are collective."""

    def __init__(
        self,
        checkpoints: CheckpointManager,
        settings: CheckpointSection,
        collect: Callable[[], Saved],
        paused: Callable[[str], AbstractContextManager[None]],  # entered while training waits
        on_save: Callable[[Path], None],  # called when a checkpoint has been published
    ) -> None:
        self.checkpoints = checkpoints
        self.settings = settings
        self.step = -1  # the last one that was saved, or is being saved
        self._collect, self._paused, self._on_save = collect, paused, on_save
        self._prepared = False
        self.restart_clock()

    def restart_clock(self) -> None:
        self._at = time.monotonic()

    def due(self) -> bool:
        """Return whether it is time to save: the minutes of the recipe have passed since the last save.

        It must also be 20 times as long as training waits for a save, so that a large model does not spend the run on
        saving, and the last save must be written.
        """
        if self.checkpoints.in_background:
            return False
        minutes, report = self.settings.interval.minutes, self.checkpoints.report
        wait = max(60 * minutes, 0.0 if report is None else max(20 * report.paused_seconds, report.seconds))
        return minutes > 0 and time.monotonic() - self._at >= wait

    def prepare(self, has_state: bool) -> None:
        """Do once, ahead of the first save, what does not depend on the step: training waits for less then.

        `has_state`: whether the optimizer has updated weights, so that its state exists.
        """
        if has_state and self.settings.asynchronous and not self._prepared:
            _, tensors, _, _ = self._collect()
            self.checkpoints.prepare(tensors)
            self._prepared = True

    def save(self, step: int) -> Path | None:
        """Save a step, unless it is saved already, and wait until it is written."""
        self.finish()
        if self.step == step:
            return None
        with self._paused("saving"):
            path = self.checkpoints.save(*self._collect())
        self.step = step
        self.restart_clock()
        self._on_save(path)
        return path

    def begin(self, step: int) -> None:
        """Save a step. Unless the recipe says otherwise, training waits for a copy of its tensors alone."""
        if not self.settings.asynchronous:
            self.save(step)
            return
        self.finish()
        if self.step != step:
            with self._paused("saving"):
                self.checkpoints.save_in_background(*self._collect())
            self.step = step
            self.restart_clock()

    def finish(self, last: bool = False) -> None:
        """Wait for the save in the background, if there is one. If it has failed, the run goes on without it, unless it
        was the last."""
        if not self.checkpoints.in_background:
            return
        try:
            with self._paused("saving"):
                path = self.checkpoints.finish_background()
        except Exception as error:
            self.step = -1
            if last:
                raise
            log.logger().error("a checkpoint was not written, and the run goes on without it: %s", error)
            return
        if path is not None:
            self._on_save(path)

    def finish_after_error(self, alone: bool) -> None:
        """Let a save that is being written come to its end. Other ranks, which write with this one, may be gone."""
        with contextlib.suppress(Exception):
            self.checkpoints.finish_background(None if alone else _WAIT_AFTER_ERROR_S)
