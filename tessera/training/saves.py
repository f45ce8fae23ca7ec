"""Decide when a run saves, how long it waits for a save, and whether a resume fits the run that saved."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor

from tessera.checkpoint.manager import CheckpointManager
from tessera.config.run_config import CheckpointSection
from tessera.core.callback import Callback
from tessera.errors import TesseraError, nearest
from tessera.runtime import log

_WAIT_AFTER_ERROR_S = 10.0  # for a checkpoint that is written together with other ranks

# The content of a save: number of the step, tensors by name, the rest of the state, and the recipe.
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
        """Save a step. With asynchronous saves, training waits only for a copy of the tensors."""
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


def check_resumed(step: int, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise if a run cannot go on from a checkpoint. Log differences that are allowed, and their effect.

    `before`, `now`: see `Trainer.state_dict`; of the checkpoint, and of the trainer before it is restored.
    """
    if before["seed"] != now["seed"]:
        raise TesseraError(
            f"the run was trained with train.seed={before['seed']}, now it is {now['seed']}: "
            "the data order would change in the middle",
            where="train.seed",
            fix=f"set train.seed={before['seed']}",
            code="run.seed-changed",
        )
    if before.get("data") and not set(str(before["data"]).split("/")) & set(str(now["data"]).split("/")):
        log.logger().warning(
            "the data, or the way it is packed, has changed since step %d was saved: rows hold other samples now, "
            "of which some may come again and some not in this pass",
            step,
        )
    old, new = dict(before["schedule"]), dict(now["schedule"])
    if old.get("kind") == new["kind"] == "constant":
        new.pop("steps")  # a constant rate does not ask how long the run is
    changed = [f"{key} {old[key]} -> {new[key]}" for key in new if key in old and old[key] != new[key]]
    if changed:
        log.logger().warning(
            "the schedule has changed since step %d was saved (%s): the learning rate goes on from its new value",
            step,
            ", ".join(changed),
        )
    if before["world"] != now["world"]:
        log.logger().info(
            "world size was %d and is %d now: samples and their order are the same, sums are so to rounding",
            before["world"],
            now["world"],
        )


def check_callback_names(callbacks: Sequence[Callback]) -> None:
    """Raise if two callbacks would keep their states in the checkpoint under one name, or if one is no callback."""
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise TesseraError(
                f"{callback!r} is no callback",
                where="callbacks",
                fix="give an object of a class derived from tessera.core.callback.Callback",
                code="run.not-a-callback",
            )
    names = [callback.name for callback in callbacks if type(callback).state_dict is not Callback.state_dict]
    for name in names:
        if names.count(name) > 1:
            raise TesseraError(
                f"{names.count(name)} callbacks keep state in the checkpoint under the name {name}",
                where="callbacks",
                fix="give one of them another `name` (a property of its class)",
                code="run.callback-name-twice",
            )


def restore_callbacks(callbacks: Sequence[Callback], states: Mapping[str, dict[str, Any]]) -> list[str]:
    """Restore the states of callbacks by their names; return a sentence for each state that no callback takes up."""
    for callback in callbacks:
        callback.load_state_dict(states.get(callback.name, {}))
    here = {callback.name for callback in callbacks}
    sentences = []
    for name in [name for name, state in states.items() if state and name not in here]:
        near = nearest(name, here)
        renamed = f"; did it get another name? This run has {near}" if near else ""
        sentences.append(
            f"the checkpoint has state of a callback {name}, which this run does not have: it is not restored{renamed}"
        )
    return sentences
