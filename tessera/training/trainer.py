"""Run the training loop. The trainer does not depend on modality, parallel layout or file format."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tessera.checkpoint.manager import CheckpointManager
from tessera.checkpoint.state import MODEL, training_tensors
from tessera.config.run_config import RunConfig
from tessera.config.run_length import Interval, RunLength
from tessera.config.run_paths import kept_text
from tessera.core.batch import Batch
from tessera.core.callback import AsyncScalars, Callback, OptimizerStep, StepResult
from tessera.core.engine import TrainingEngine
from tessera.core.step_source import StepSource
from tessera.core.task import LossTotals, Task
from tessera.optim.optimizer import lr_factor, set_learning_rate
from tessera.runtime import log, rng
from tessera.runtime.distributed import World, agree_on_step
from tessera.training.out_of_memory import MemoryAdvice
from tessera.training.saves import Saved, Saves, check_callback_names, check_resumed, restore_callbacks, restoring
from tessera.training.steps import DataWait, unequal_steps


class Trainer:
    """Run the training loop until the last step, a stop request or an error. `build_trainer` makes its parts."""

    def __init__(
        self,
        *,
        config: RunConfig,
        length: RunLength,
        world: World,
        module: nn.Module,
        engine: TrainingEngine,
        initial_weights: Callable[[], None],  # fills the module of a new run
        task: Task,
        optimizer: torch.optim.Optimizer,
        clip_gradients: Callable[[], torch.Tensor],  # clips the gradients of the next update; returns their norm
        steps: StepSource,
        checkpoints: CheckpointManager,
        callbacks: Sequence[Callback] = (),
        optimizer_step: OptimizerStep | None = None,  # applies or drops updates (the guard); also a callback
        eval_weights: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
        eval_batches: Callable[[], Iterable[tuple[Batch, bool]]] | None = None,  # (batch, whether its loss counts)
        memory: MemoryAdvice | None = None,
        data_identity: str = "",  # fingerprint of the data and its order; empty: unknown
    ) -> None:
        self.config = config
        self.length = length
        self.world = world
        self.module = module
        self.engine = engine
        self.task = task
        self.optimizer = optimizer
        self.steps = steps
        self.checkpoints = checkpoints
        self.optimizer_step = optimizer_step or OptimizerStep()
        self.callbacks = [self.optimizer_step, *callbacks]
        check_callback_names(self.callbacks)
        self.eval_weights = eval_weights  # context manager that switches to averaged weights, for evaluation
        self.data_identity = data_identity
        self.step = 0
        self.paused_seconds = 0.0  # seconds spent on evaluation and saving
        self.stop_reason: str | None = None  # reason of `request_stop`; a resume continues the run
        self.ended_early: str | None = None  # reason of `end_early`; the run is complete
        self._save_requested = False
        # Functions that are called with the name of each phase when it begins.
        self.phase_listeners: list[Callable[[str], None]] = []
        self.phase = "starting"
        self._initial_weights = initial_weights
        self._wait = DataWait()
        # The state of `steps` from before the current step read its data; None between steps.
        self._source_state: dict[str, Any] | None = None
        self._memory = memory or MemoryAdvice(config, world.size)
        self._clip_gradients = clip_gradients
        self._eval_batches = eval_batches
        on_save = functools.partial(self._call, "on_save")
        self.steps.setup(module, task, world)
        self._saves = Saves(checkpoints, config.checkpoint, self._saved, self.paused, on_save)

    # ------------------------------------------------------------------------------------------ the loop

    def run(self) -> None:
        """Train until the last step, evaluate and save."""
        try:
            self.start()
            self.steps.start(self.step, self.rows_drawn)
            before = self.step
            self._loop()
            self.optimizer_step.check_trained(self)
            if self.step > before and not (self.stop_reason or self.ended_early) and self._eval_batches is not None:
                self.evaluate()
            if self.config.checkpoint.at_end or self._save_requested:
                self.save()
            self._saves.finish(last=True)
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            self.steps.close()
        self.end()

    def start(self) -> None:
        """Begin training. `run` calls this; another loop calls `start`, then `train_step` for each step, then `end`."""
        self._call("on_start")
        self.module.train()

    def end(self) -> None:
        """End training: callbacks write their last lines and close files."""
        self.phase = "ending"
        self.engine.collect(self.optimizer)  # copy trained duplicates of weights to the module, which callbacks export
        self._call("on_end")

    def fail(self, error: BaseException) -> None:
        """End training after an error: callbacks close files and end processes."""
        for callback in reversed(self.callbacks):  # the last callback closes first, like nested contexts
            callback.on_error(self, error)
        self._saves.finish_after_error(alone=self.world.size == 1)

    def _loop(self) -> None:
        self._saves.restart_clock()
        while self.step < self.length.steps and self.ended_early is None:
            self.phase = "loading data"
            self._source_state = self.steps.state_dict()
            microbatches = self._wait.next_step(self.steps, lambda: self.stop_reason is not None)
            # Agree when all ranks have read their data, so that none waits for another's data inside of a step.
            if not self._goes_on(0 if microbatches is None else len(microbatches)) or microbatches is None:
                break
            if (result := self.train_step(microbatches)) is None:
                continue
            self._saves.prepare(result.applied)
            last = self.step == self.length.steps
            if self._eval_batches is not None and self._due(self.config.train.eval_interval) and not last:
                self.evaluate()
            if (self._save_requested or self._due(self.config.checkpoint.interval)) and not last:
                self._save_requested = False
                self._saves.begin(self.step)

    def _due(self, every: Interval) -> bool:
        return self.length.due(every, self.step, self.rows_drawn)

    def train_step(self, microbatches: Sequence[Batch]) -> StepResult | None:
        """Run one optimizer step on this rank's micro-batches; return None if the guard restored an earlier state."""
        rng.seed_process(self.config.train.seed, "step", self.step, self.world.rank)
        self._call("on_step_begin")
        self.phase = "running the model"
        with self._memory.explained(self, microbatches):
            out = self.engine.step(self.task, microbatches)
        self._call("on_before_optim")
        self.phase = "clipping gradients"
        grad_norm = self._clip_gradients()
        self.phase = "updating weights"
        lr = set_learning_rate(self.optimizer, lr_factor(self.config.optim.schedule, self.step, self.length.steps))
        loss = out.loss()
        scalars = {"loss": loss, "grad_norm": grad_norm, **out.metrics()}
        if self.engine.loss_scale is not None:
            scalars["loss_scale"] = self.engine.loss_scale.state[0]  # the loss scale that the next step will use
        numbers = AsyncScalars.of(scalars, out.counted())
        with self._memory.explained(self, microbatches):
            outcome = self.optimizer_step.update(self, loss, grad_norm, microbatches)
        self.optimizer.zero_grad(set_to_none=True)
        if outcome == "rewound":
            return None
        self.step, self._source_state = self.step + 1, None
        self.phase = "reporting"
        # Callbacks store results of several steps, so results must not reference tensors.
        described = [replace(batch, tensors={}, segments={}) for batch in microbatches]
        result = StepResult(self.step, numbers, lr, described, outcome == "applied", self.epoch)
        self._call("on_step_end", result)
        return result

    @property
    def phase(self) -> str:
        return self._phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self._phase = phase
        for listener in self.phase_listeners:
            listener(phase)

    def _goes_on(self, microbatches: int) -> bool:
        """Return whether all ranks run the next step. Save before it if a save is due by the clock of the main rank.

        A stop request on one rank stops all ranks. `microbatches`: the number of micro-batches on this rank.
        """
        self.phase = "agreeing to go on"
        equal, (stop, save, writing) = agree_on_step(
            self.step,
            microbatches,
            self.stop_reason is not None,
            self.world.is_main and self._saves.due(),
            self.checkpoints.is_writing,
        )
        if not writing:
            self._saves.finish()
        if stop:
            self.stop_reason = self.stop_reason or "another rank was asked to stop"
            return False
        if not equal:
            raise unequal_steps(self.steps, microbatches)
        if save:
            self._saves.begin(self.step)
        return True

    def request_stop(self, reason: str) -> None:
        """Finish this step, save (`checkpoint.at_end`) and end. Signal handlers and callbacks may call this."""
        self.stop_reason = reason
        self._wait.end()

    def request_save(self) -> None:
        """Request a save after this step. All ranks must do so at the same step."""
        self._save_requested = True

    def end_early(self, reason: str) -> None:
        """End the run as if this step were its last. All ranks must do so at the same step."""
        self.ended_early = reason

    # ------------------------------------------------------------------------------------------ evaluation

    def evaluate(self) -> dict[str, float]:
        """Return loss and metrics over the held-out rows, equal on every rank."""
        assert self._eval_batches is not None
        totals: LossTotals | None = None
        with self.paused("evaluating"), self.eval_weights():
            for batch, counts in self._eval_batches():
                with self._memory.explained(self, [batch]):
                    out = self.engine.evaluate(self.task, batch.to(self.world.device), counts)
                totals = out if totals is None else totals + out
        assert totals is not None, "held-out rows make at least one batch"
        metrics = AsyncScalars.of({"loss": totals.held_out_loss(), **totals.metrics()}, totals.counted())()
        self.report_eval(metrics)
        return metrics

    def report_eval(self, metrics: dict[str, float]) -> None:
        self._call("on_eval", metrics)

    # ------------------------------------------------------------------------------------------ state

    @property
    def rows_drawn(self) -> int:
        """Return the number of rows that training has used over all ranks: the data position, for any layout."""
        return self._first_row + (self.step - self._first_step) * self.length.rows_per_step

    @property
    def data_seconds(self) -> float:
        return self._wait.seconds

    @property
    def epoch(self) -> float | None:
        """Return the number of passes over the data so far; None if the length of the data is unknown."""
        return self.length.epoch(self.rows_drawn)

    # `rows_drawn` counts from this row and step: those of the last start, resume or `go_to_row`.
    _first_row = _first_step = 0

    def tensors(self) -> dict[str, torch.Tensor]:
        self.engine.collect(self.optimizer)
        return training_tensors(self.module, self.optimizer)

    def side_tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that callbacks save in checkpoints, such as averaged weights."""
        return {name: tensor for callback in self.callbacks for name, tensor in callback.state_tensors(self).items()}

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            **self.length.position(self.rows_drawn),
            "seed": self.config.train.seed,  # all random numbers are derived from the seed and the step
            "schedule": {**self.config.optim.schedule.model_dump(mode="json"), "steps": self.length.steps},
            "world": self.world.size,
            "data": self.data_identity,
            "weights_only": self.config.checkpoint.weights_only,
            "callbacks": {c.name: c.state_dict() for c in self.callbacks},
            "steps": self.steps.state_dict() if self._source_state is None else self._source_state,
        }

    def save(self) -> Path | None:
        """Save this step, unless it is saved already, and wait until the checkpoint is written."""
        return self._saves.save(self.step)

    def _saved(self) -> Saved:
        tensors = {**self.tensors(), **self.side_tensors()}
        if self.config.checkpoint.weights_only:
            tensors = {name: tensor for name, tensor in tensors.items() if name.startswith(MODEL)}
        return self.step, tensors, self.state_dict(), kept_text(self.config)

    def begin(self) -> None:
        """Fill the model of a new run with its initial weights."""
        self._initial_weights()
        self.engine.settle(self.optimizer)

    def resume(self, before: int | None = None) -> bool:
        """Continue from the newest good checkpoint of this run; return False if there is none.

        `before`: load only checkpoints of steps before this step.
        """
        self._saves.finish()
        loaded = self.checkpoints.resume(self.tensors(), may_lack=self.side_tensors(), before=before)
        if loaded is None:
            return False
        step, state = loaded
        check_resumed(step, state, self.state_dict())
        self.restore_state(step, state)
        self._saves.step = step
        return True

    def restore_state(self, step: int, state: Mapping[str, Any]) -> None:
        """Restore the run from `state` (see `state_dict`), except tensors, which must be loaded before."""
        self.engine.settle(self.optimizer)
        self.step = self._first_step = step
        with restoring("rows_drawn"):
            self._first_row, self._saves.step = self.length.row_after(state), -1
        self._source_state = None
        with restoring("steps"):
            self.steps.load_state_dict(state.get("steps", {}))
        for lost in restore_callbacks(self.callbacks, state["callbacks"]):
            log.logger().warning("%s", lost)

    def go_to_row(self, row: int) -> None:
        """Continue the data at a row index. Callers that changed the rows of the data set use this."""
        self._first_row, self._first_step = row, self.step

    def continue_from_here(self) -> None:
        """Continue after a rollback: callbacks drop records of later steps, and data is read from this step on."""
        self._call("on_rewind")
        self.steps.start(self.step, self.rows_drawn)

    @contextlib.contextmanager
    def paused(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        self.phase = phase
        try:
            yield
        finally:
            self.paused_seconds += time.perf_counter() - started

    def _call(self, moment: str, *details: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, moment)(self, *details)
