"""Keep the checkpoint with the best held-out metric, and end a run that no longer gets better."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

from tessera.checkpoint.manager import CheckpointManager
from tessera.config.run_config import MetricSection, RunConfig
from tessera.config.train import EarlyStopSection
from tessera.core.callback import Callback, TrainerHandle
from tessera.errors import TesseraError, nearest
from tessera.runtime.files import replace_file

log = logging.getLogger("tessera")
BEST_FILE = "best.json"


def best_callbacks(config: RunConfig, has_eval: bool, checkpoints: CheckpointManager) -> list[Callback]:
    """Return the callbacks of `checkpoint.keep_best` and `train.early_stop`.

    Raise if one of these keys is set, and the run has neither held-out data nor benchmarks.
    """
    keep, stop = config.checkpoint.best, config.train.early_stop
    callbacks: list[Callback] = []
    if keep is not None:
        callbacks.append(KeepBest(keep, checkpoints))
    if stop is not None:
        callbacks.append(EarlyStop(stop))
    if not callbacks:
        return []
    where = "checkpoint.keep_best" if keep is not None else "train.early_stop"
    if not has_eval:
        raise TesseraError(
            "this key needs held-out data or benchmarks, and the recipe names none",
            where=where,
            fix="set data.eval to files with held-out samples, or evaluation.tasks to benchmarks",
            code="recipe.no-held-out-data",
        )
    return callbacks


def check_measured(config: RunConfig) -> None:
    """Raise if a key of `best_callbacks` is set, and the run evaluates only once."""
    keep, stop = config.checkpoint.best, config.train.early_stop
    if (keep is None and stop is None) or config.train.eval_interval or config.train.generate_every:
        return
    if config.evaluation.tasks and config.evaluation.every:
        return
    raise TesseraError(
        "the run evaluates only once, at its end: there are no checkpoints to compare",
        where="checkpoint.keep_best" if keep is not None else "train.early_stop",
        fix="set how often to evaluate, such as train.eval_every=1epoch or train.eval_every=200",
        code="recipe.held-out-never-measured",
    )


class Best:
    """Hold the best value of a held-out metric so far, and its step."""

    def __init__(self, section: MetricSection, min_change: float = 0.0) -> None:
        self.metric, self.lower = section.metric, section.lower_is_better
        self.min_change = min_change
        self.value: float | None = None
        self.step = -1
        self._warned = False

    def take(self, trainer: TrainerHandle, metrics: dict[str, float]) -> bool | None:
        """Return whether `metrics` have the best value of the metric so far; None if they lack the metric."""
        value = metrics.get(self.metric)
        if value is None:
            self._warn(trainer, metrics)
            return None
        if not math.isfinite(value):
            return False
        gain = math.inf if self.value is None else (self.value - value if self.lower else value - self.value)
        if gain <= self.min_change:
            return False
        self.value, self.step = value, trainer.step
        return True

    def _warn(self, trainer: TrainerHandle, metrics: dict[str, float]) -> None:
        config = trainer.config
        measured_apart = bool(self.metric == "exact_match" and config.train.generate_every)
        # `metrics` never contains benchmark scores, which are reported by another evaluation.
        measured_apart |= bool(config.evaluation.tasks)
        if self._warned or self.value is not None or measured_apart or "loss" not in metrics:
            return
        self._warned = True
        if trainer.world.is_main:
            near = nearest(self.metric, metrics)
            log.warning(
                "the held-out set has no metric %r%s: it has %s",
                self.metric,
                f" (did you mean {near}?)" if near else "",
                ", ".join(sorted(metrics)),
            )

    def state(self) -> dict[str, Any]:
        return {"value": self.value, "step": self.step}

    def restore(self, state: dict[str, Any]) -> None:
        value = state.get("value")
        self.value, self.step = None if value is None else float(value), int(state.get("step", -1))

    def __str__(self) -> str:
        return f"best held-out {self.metric} {self.value:.4f} at step {self.step}"


class KeepBest(Callback):
    """Save a checkpoint whenever the held-out metric has a new best value, and protect it from removal."""

    def __init__(self, section: MetricSection, checkpoints: CheckpointManager) -> None:
        self.best = Best(section)
        self._checkpoints = checkpoints

    def on_start(self, trainer: TrainerHandle) -> None:
        self._checkpoints.folders.protected_step = self.best.step

    def on_rewind(self, trainer: TrainerHandle) -> None:
        self.on_start(trainer)

    def on_eval(self, trainer: TrainerHandle, metrics: dict[str, float]) -> None:
        if self.best.take(trainer, metrics):
            trainer.request_save()

    def on_save(self, trainer: TrainerHandle, path: Path) -> None:
        # Until the new checkpoint is written, the previous best checkpoint stays protected.
        if path.name.split(".")[0] != f"step-{self.best.step:08d}":
            return
        self._checkpoints.protect(self.best.step)
        if trainer.world.is_main:
            record = {"metric": self.best.metric, **self.best.state(), "checkpoint": f"checkpoints/{path.name}"}
            replace_file(trainer.config.folder / BEST_FILE, (json.dumps(record) + "\n").encode())

    def on_end(self, trainer: TrainerHandle) -> None:
        if trainer.world.is_main and self.best.value is not None:
            log.info("%s: %s", self.best, trainer.config.folder / "checkpoints" / f"step-{self.best.step:08d}")

    def state_dict(self) -> dict[str, Any]:
        return self.best.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best.restore(state)


class EarlyStop(Callback):
    """End the run when a held-out metric has not improved for several evaluations."""

    def __init__(self, section: EarlyStopSection) -> None:
        self.best = Best(section, section.min_change)
        self.max_worse = section.patience
        self.worse = 0  # number of evaluations since the best one

    def on_start(self, trainer: TrainerHandle) -> None:
        self._end(trainer)  # ends a resumed run at once if it had stopped early

    def on_eval(self, trainer: TrainerHandle, metrics: dict[str, float]) -> None:
        better = self.best.take(trainer, metrics)
        if better is not None:
            self.worse = 0 if better else self.worse + 1
            self._end(trainer)

    def _end(self, trainer: TrainerHandle) -> None:
        if self.worse >= self.max_worse:
            trainer.end_early(f"no better held-out {self.best.metric} in {self.worse} evaluations; {self.best}")

    def state_dict(self) -> dict[str, Any]:
        return {**self.best.state(), "worse": self.worse}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best.restore(state)
        self.worse = int(state.get("worse", 0))
