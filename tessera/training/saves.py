"""Decide when a run saves, how long it waits for a save, and whether a checkpoint can be resumed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from tessera.checkpoint.manager import CheckpointManager
from tessera.checkpoint.stored import STATE
from tessera.config.run_config import CheckpointSection
from tessera.core.callback import Callback
from tessera.errors import TesseraError, nearest
from tessera.runtime import log

_KINDS = {"seed": int, "schedule": dict, "world": int, "callbacks": dict}  # types of values that a resume needs
_WAIT_AFTER_ERROR_S = 10.0  # maximum wait for a save after an error: other ranks may have ended

# The content of a checkpoint: step, tensors by name, other state, and the recipe.
Saved = tuple[int, dict[str, Tensor], dict[str, Any], str]


class Saves:
    """Write the checkpoints of a run, in the background if asynchronous. All ranks call each method, except `due`."""

    def __init__(
        self,
        checkpoints: CheckpointManager,
        settings: CheckpointSection,
        collect: Callable[[], Saved],
        paused: Callable[[str], AbstractContextManager[None]],  # context manager that stops the clock of training
        on_save: Callable[[Path], None],  # called with the path of each written checkpoint
    ) -> None:
        self.checkpoints = checkpoints
        self.settings = settings
        self.step = -1  # last step that was saved or is being saved
        self._collect, self._paused, self._on_save = collect, paused, on_save
        self._prepared = False
        self.restart_clock()

    def restart_clock(self) -> None:
        self._at = time.monotonic()

    def due(self) -> bool:
        """Return whether it is time to save: the minutes of `checkpoint.every` have passed since the last save.

        If saving is slow, wait longer: at least 20 times as long as the last save paused training, and as long as that
        save took. False while a save runs in the background.
        """
        if self.checkpoints.in_background:
            return False
        minutes, report = self.settings.interval.minutes, self.checkpoints.report
        wait = max(60 * minutes, 0.0 if report is None else max(20 * report.paused_seconds, report.seconds))
        return minutes > 0 and time.monotonic() - self._at >= wait

    def prepare(self, has_state: bool) -> None:
        """Prepare asynchronous saves once, so that the first save pauses training for less time.

        `has_state`: whether the optimizer's state exists, which the first update creates. Do nothing for a run that
        saves only at its end, since it waits for that save anyway.
        """
        if has_state and self.settings.asynchronous and self.settings.interval and not self._prepared:
            _, tensors, _, _ = self._collect()
            self.checkpoints.prepare(tensors)
            self._prepared = True

    def save(self, step: int) -> Path | None:
        """Save a step, unless it is saved already, and wait until the checkpoint is written."""
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
        """Wait for the save in the background, if there is one. Log its error; raise it for the last save of a run."""
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
        """Wait for the save in the background. `alone`: whether the run has one rank. With more ranks, wait only a few
        seconds, because other ranks may have ended."""
        with contextlib.suppress(Exception):
            self.checkpoints.finish_background(None if alone else _WAIT_AFTER_ERROR_S)


@contextmanager
def restoring(key: str) -> Iterator[None]:
    """Turn errors about wrong values in the `with` block into a `TesseraError` that names a key of `state.json`."""
    try:
        yield
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
        raise TesseraError(
            f"{key} in the state of the checkpoint cannot be restored: {error!r}",
            where=STATE,
            fix="use another checkpoint: move this one out of the folder checkpoints",
            code="checkpoint.state-not-restored",
        ) from error


def check_resumed(step: int, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise if a run cannot be resumed from a checkpoint. Log differences that are allowed.

    `before`, `now`: the result of `Trainer.state_dict` in the checkpoint, and of the new trainer.
    """
    for key, kind in _KINDS.items():
        with restoring(key):
            if not isinstance(before[key], kind):
                raise TypeError(f"the value is not of type {kind.__name__}")
    if before["seed"] != now["seed"]:
        raise TesseraError(
            f"the run was trained with train.seed={before['seed']}, now it is {now['seed']}: "
            "the order of the data would change",
            where="train.seed",
            fix=f"set train.seed={before['seed']}",
            code="run.seed-changed",
        )
    if before.get("data") and not set(str(before["data"]).split("/")) & set(str(now["data"]).split("/")):
        log.logger().warning(
            "the data, or its packing, has changed since step %d was saved: this epoch may repeat some samples and "
            "leave out others",
            step,
        )
    old, new = dict(before["schedule"]), dict(now["schedule"])
    if old.get("kind") == new["kind"] == "constant":
        new.pop("steps")  # a constant learning rate does not depend on the number of steps
    changed = [f"{key} {old[key]} -> {new[key]}" for key in new if key in old and old[key] != new[key]]
    if changed:
        log.logger().warning(
            "the schedule has changed since step %d was saved (%s): the learning rate follows the new schedule",
            step,
            ", ".join(changed),
        )
    if before["world"] != now["world"]:
        log.logger().info(
            "world size was %d and is %d now: the order of samples is the same, and sums differ by rounding",
            before["world"],
            now["world"],
        )


def check_callback_names(callbacks: Sequence[Callback]) -> None:
    """Raise if two callbacks with state have the same name, or if an object is no callback."""
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
                f"{names.count(name)} callbacks that save state in checkpoints have the name {name}",
                where="callbacks",
                fix="give one of them another `name` (a property of its class)",
                code="run.callback-name-twice",
            )


def restore_callbacks(callbacks: Sequence[Callback], states: Mapping[str, dict[str, Any]]) -> list[str]:
    """Restore the states of callbacks by name; return a warning for each saved state without a callback."""
    for callback in callbacks:
        with restoring(f"callbacks.{callback.name}"):
            callback.load_state_dict(dict(states.get(callback.name, {})))
    here = {callback.name for callback in callbacks}
    sentences = []
    for name in [name for name, state in states.items() if state and name not in here]:
        near = nearest(name, here)
        renamed = f"; did it get another name? This run has {near}" if near else ""
        sentences.append(
            f"the checkpoint has state of a callback {name}, which this run does not have: it is not restored{renamed}"
        )
    return sentences
