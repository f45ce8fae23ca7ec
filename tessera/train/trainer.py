"""Time, order and bookkeeping of a run. It knows no modality, no parallel axis and no file format."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tessera.checkpoint.manager import CheckpointManager
from tessera.checkpoint.model_state import training_tensors
from tessera.core import log, rng
from tessera.core.dist import World, agree_on_step
from tessera.core.errors import TesseraError
from tessera.core.run_config import RunConfig
from tessera.core.run_paths import kept_text
from tessera.core.types import Batch, Task
from tessera.data.loader.loader import Loader
from tessera.optim.schedule import factor, set_learning_rate
from tessera.parallel.engine import Engine
from tessera.train.callbacks import Callback, Stepper, StepResult, begin_look


class Trainer:
    """Made of finished parts (see `train.build`); runs them until the last step, a stop request or an error."""

    def __init__(
        self,
        *,
        config: RunConfig,
        world: World,
        module: nn.Module,
        engine: Engine,
        first_weights: Callable[[], None],  # fills the module for a run that begins
        task: Task,
        optimizer: torch.optim.Optimizer,
        finish_gradients: Callable[[torch.Tensor], torch.Tensor],  # given a count, has them scaled; gives the norm
        loader: Callable[[int], Loader],  # from the row to start with
        checkpoints: CheckpointManager,
        callbacks: Sequence[Callback] = (),
        stepper: Stepper | None = None,  # applies updates, unless it finds a step bad; also hears what callbacks hear
        eval_weights: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
        eval_batches: Callable[[], Iterable[tuple[Batch, bool]]] | None = None,  # (batch, whether it counts)
        data_identity: str = "",  # of the order of rows; empty: unknown
    ) -> None:
        self.config = config
        self.world = world
        self.module = module
        self.engine = engine
        self.task = task
        self.optimizer = optimizer
        self.checkpoints = checkpoints
        self.stepper = stepper or Stepper()
        self.callbacks = [self.stepper, *callbacks]
        self.eval_weights = eval_weights  # while it is entered, the module has the weights to evaluate
        self.data_identity = data_identity
        self.step = 0
        self.paused_seconds = 0.0  # spent on evaluation and saving
        self.stop_reason: str | None = None
        self.followers: list[Callable[[str], None]] = []  # hear what the run turns to, when it does
        self.doing = "starting"  # for whoever watches from another thread
        self.loader: Loader | None = None
        self._first_weights = first_weights
        self._make_loader = loader
        self._finish_gradients = finish_gradients
        self._eval_batches = eval_batches
        self._saved_step = -1
        self._saved_at = time.monotonic()

    # ------------------------------------------------------------------------------------------ the loop

    def run(self) -> None:
        try:
            self._tell("on_start")
            self._open_loader()
            self.module.train()
            before = self.step
            self._loop()
            if self.step > before and self.stop_reason is None and self._eval_batches is not None:
                self.evaluate()
            if self.config.checkpoint.at_end:
                self.save()
        except BaseException as error:
            for callback in reversed(self.callbacks):  # undone in the opposite order, as with nested contexts
                callback.on_error(self, error)
            raise
        finally:
            self._close_loader()
        self.doing = "ending"
        self._tell("on_end")

    def _loop(self) -> None:
        settings = self.config.train
        self._saved_at = time.monotonic()
        while self.step < settings.steps and self._goes_on():
            self.doing = "loading data"
            assert self.loader is not None
            microbatches = next(self.loader)
            rng.seed_process(settings.seed, "step", self.step, self.world.rank)
            self._tell("on_step_begin")
            self.doing = "running the model"
            out = self.engine.step(self.task, microbatches)
            self.doing = "finishing gradients"
            grad_norm = self._finish_gradients(out.count)
            self._tell("on_before_optim")
            self.doing = "updating weights"
            share = factor(self.config.optim.schedule, self.step, settings.steps) * self.stepper.lr_share
            lr = set_learning_rate(self.optimizer, share)
            count = out.count.clamp(min=1)
            loss, metrics = out.sum / count, {name: value / count for name, value in out.metrics.items()}
            numbers = begin_look({"loss": loss, "grad_norm": grad_norm, **metrics})
            fate = self.stepper.update(self, loss, grad_norm, microbatches)
            self.optimizer.zero_grad(set_to_none=True)
            if fate == "rewound":
                continue
            self.step += 1
            self.doing = "reporting"
            told = [replace(batch, tensors={}, segments={}) for batch in microbatches]  # results outlive their step
            result = StepResult(self.step, numbers, lr, told, fate == "applied")
            self._tell("on_step_end", result)
            last = self.step == settings.steps
            if self._eval_batches is not None and _due(self.step, settings.eval_every) and not last:
                self.evaluate()
            if _due(self.step, self.config.checkpoint.every) and not last:
                self.save()

    @property
    def doing(self) -> str:
        return self._doing

    @doing.setter
    def doing(self, what: str) -> None:
        self._doing = what
        for follower in self.followers:
            follower(what)

    def _goes_on(self) -> bool:
        """Agree with all ranks on what comes before the next step. A stop asked of one rank (a signal reaches each at
        another moment) is a stop of all. That it is time to save, the main rank's clock says."""
        self.doing = "agreeing to go on"
        stop, save = agree_on_step(self.step, self.stop_reason is not None, self.world.is_main and self._save_is_due())
        if stop:
            self.stop_reason = self.stop_reason or "another rank was asked to stop"
            return False
        if save:
            self.save()
        return True

    def _save_is_due(self) -> bool:
        """Return whether enough minutes have passed: as many as the recipe says, and 20 times as long as a save takes,
        so that saving a large model cannot eat up the run."""
        minutes, report = self.config.checkpoint.minutes_between, self.checkpoints.report
        wait = max(60 * minutes, 0.0 if report is None else 20 * report.seconds)
        return minutes > 0 and time.monotonic() - self._saved_at >= wait

    def request_stop(self, reason: str) -> None:
        """From a signal handler or a callback: finish this step, save, leave."""
        self.stop_reason = reason

    def _open_loader(self) -> None:
        self._close_loader()
        self.loader = self._make_loader(self.rows_drawn)

    def _close_loader(self) -> None:
        loader, self.loader = self.loader, None
        if loader is not None:
            loader.close()

    # ------------------------------------------------------------------------------------------ evaluation

    def evaluate(self) -> dict[str, float]:
        """Loss over the held-out rows, the same on every rank."""
        assert self._eval_batches is not None
        total, count = 0.0, 0.0
        sums: dict[str, float] = {}
        with self.paused("evaluating"), self.eval_weights():
            for batch, counts in self._eval_batches():
                out = self.engine.evaluate(self.task, batch.to(self.world.device), counts)
                total += float(out.sum)
                count += float(out.count)
                for name, value in out.metrics.items():
                    sums[name] = sums.get(name, 0.0) + float(value)
        metrics = {"loss": total / max(count, 1), **{n: v / max(count, 1) for n, v in sums.items()}}
        self.tell_eval(metrics)
        return metrics

    def tell_eval(self, metrics: dict[str, float]) -> None:
        self._tell("on_eval", metrics)

    # ------------------------------------------------------------------------------------------ state

    @property
    def rows_drawn(self) -> int:
        """Data position: rows of the global order that training has used. Independent of ranks and micro-batches."""
        return self._first_row + (self.step - self._first_step) * self.config.train.global_batch

    _first_row = (
        0  # where the row count stood at `_first_step`: differs from step * batch only if a resume changed the batch
    )
    _first_step = 0

    def tensors(self) -> dict[str, torch.Tensor]:
        return training_tensors(self.module, self.optimizer)

    def side_tensors(self) -> dict[str, torch.Tensor]:
        """Those of callbacks."""
        return {name: tensor for callback in self.callbacks for name, tensor in callback.state_tensors(self).items()}

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "rows_drawn": self.rows_drawn,
            "seed": self.config.train.seed,  # with the step, this is the state of every random stream
            "schedule": {**self.config.optim.schedule.model_dump(mode="json"), "steps": self.config.train.steps},
            "world": self.world.size,
            "data": self.data_identity,
            "callbacks": {c.name: c.state_dict() for c in self.callbacks},
        }

    def save(self) -> Path | None:
        if self._saved_step == self.step:
            return None
        with self.paused("saving"):
            tensors = {**self.tensors(), **self.side_tensors()}
            path = self.checkpoints.save(self.step, tensors, self.state_dict(), kept_text(self.config))
        self._saved_step, self._saved_at = self.step, time.monotonic()
        self._tell("on_save", path)
        return path

    def begin(self) -> None:
        """From the first step, with first weights."""
        self._first_weights()
        self.engine.settle(self.optimizer)

    def resume(self, before: int | None = None) -> bool:
        """Continues from the newest good checkpoint of this run's folder; False when there is none. `before`: one of an
        earlier step than that."""
        found = self.checkpoints.resume(self.tensors(), may_lack=self.side_tensors(), before=before)
        if found is None:
            return False
        step, state = found
        if state["seed"] != self.config.train.seed:
            raise TesseraError(
                f"the run was trained with train.seed={state['seed']}, now it is {self.config.train.seed}: "
                "the data order would change in the middle",
                where="train.seed",
                fix=f"set train.seed={state['seed']}",
            )
        if state.get("data") and state["data"] != self.data_identity:
            log.logger().warning(
                "the data, or the way it is packed, has changed since step %d was saved: rows hold other samples now, "
                "of which some may come again and some not in this pass",
                step,
            )
        self._tell_changes(step, state)
        self.take_up(step, state)
        self._saved_step = step
        return True

    def _tell_changes(self, step: int, state: Mapping[str, Any]) -> None:
        """Say what is allowed to differ from the run that saved `state`, and what follows from it."""
        before, now = dict(state["schedule"]), self.state_dict()["schedule"]
        if before.get("kind") == now["kind"] == "constant":
            now.pop("steps")  # a constant rate does not ask how long the run is
        changed = [f"{key} {before[key]} -> {now[key]}" for key in now if key in before and before[key] != now[key]]
        if changed:
            log.logger().warning(
                "the schedule has changed since step %d was saved (%s): the learning rate goes on from its new value",
                step,
                ", ".join(changed),
            )
        if state["world"] != self.world.size:
            log.logger().info(
                "world size was %d and is %d now: samples and their order are the same, sums are so to rounding",
                state["world"],
                self.world.size,
            )

    def take_up(self, step: int, state: Mapping[str, Any]) -> None:
        """Stands where `state` (see `state_dict`) was taken; the tensors are filled already."""
        self.engine.settle(self.optimizer)
        self.step = self._first_step = step
        self._first_row, self._saved_step = state["rows_drawn"], -1
        for callback in self.callbacks:
            callback.load_state_dict(state["callbacks"].get(callback.name, {}))

    def go_on_from_here(self) -> None:
        """After going back: records of later steps are dropped, and data comes from this step on."""
        self._tell("on_rewind")
        self._open_loader()

    @contextlib.contextmanager
    def paused(self, doing: str) -> Iterator[None]:
        started = time.perf_counter()
        self.doing = doing
        try:
            yield
        finally:
            self.paused_seconds += time.perf_counter() - started

    def _tell(self, moment: str, *details: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, moment)(self, *details)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
