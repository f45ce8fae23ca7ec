"""Define the interface between the training loop and its callbacks, which may keep state in the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from tessera.config.run_config import RunConfig
from tessera.config.run_length import RunLength
from tessera.core.batch import Batch
from tessera.core.task import Task
from tessera.errors import TesseraError, nearest
from tessera.runtime import device as devices
from tessera.runtime.distributed import World


class WaitEnded(BaseException):
    """End the wait for data: the run was asked to stop. No error, so that no sample is blamed for it."""


class TrainerHandle(Protocol):
    """Declare what a callback may use of the trainer. `tessera.training.trainer.Trainer` is the only implementation."""

    step: int  # optimizer steps done
    phase: str  # of the step, read by threads that watch the run
    phase_listeners: list[Callable[[str], None]]  # called with the new phase whenever it changes
    stop_reason: str | None
    awaits_data: bool  # a stop need not wait for it: no other rank counts on this step yet
    paused_seconds: float

    @property
    def config(self) -> RunConfig: ...

    @property
    def length(self) -> RunLength: ...

    @property
    def epoch(self) -> float | None: ...

    @property
    def rows_drawn(self) -> int: ...

    @property
    def world(self) -> World: ...

    @property
    def module(self) -> nn.Module: ...

    @property
    def engine(self) -> Any: ...

    @property
    def task(self) -> Task: ...

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    @property
    def checkpoints(self) -> Any: ...

    @property
    def loader(self) -> Any: ...

    @property
    def eval_weights(self) -> Callable[[], AbstractContextManager[None]]: ...

    def request_stop(self, reason: str) -> None: ...

    def request_save(self) -> None: ...

    def end_early(self, reason: str) -> None: ...

    def report_eval(self, metrics: dict[str, float]) -> None: ...

    def tensors(self) -> dict[str, Tensor]: ...

    def side_tensors(self) -> dict[str, Tensor]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def save(self) -> Path | None: ...

    def begin(self) -> None: ...

    def resume(self, before: int | None = None) -> bool: ...

    def restore_state(self, step: int, state: Mapping[str, Any]) -> None: ...

    def continue_from_here(self) -> None: ...

    def paused(self, phase: str) -> AbstractContextManager[None]: ...


class AsyncScalars:
    """Copy named numbers to the host while the device goes on. Calling it waits for the copy alone, and not for what
    was queued after it: begun before an update is queued, reading the loss leaves no device idle."""

    def __init__(self, names: Sequence[str], conditions: Sequence[str], copy: devices.HostCopy) -> None:
        self._names, self._conditions, self._copy = names, conditions, copy

    @staticmethod
    def of(numbers: Mapping[str, Tensor], counted: Mapping[str, Tensor] | None = None) -> AsyncScalars:
        """Begin to copy scalars to the host. `counted`: of some of them, whether there is such a number; one that is
        not there is left out."""
        conditions = counted or {}
        wide = devices.sum_dtype(next(iter(numbers.values())).device)
        stacked = torch.stack([number.detach().to(wide) for number in (*numbers.values(), *conditions.values())])
        return AsyncScalars(list(numbers), list(conditions), devices.HostCopy(stacked))

    def __call__(self) -> dict[str, float]:
        values = self._copy()
        there = dict(zip(self._conditions, values[len(self._names) :], strict=True))
        return {name: value for name, value in zip(self._names, values, strict=False) if there.get(name, 1.0)}

    def ready(self) -> bool:
        """Return whether a call would not have to wait."""
        return self._copy.ready()


@dataclass(frozen=True)
class StepResult:
    """Describe one finished optimizer step."""

    step: int  # steps done, this one included
    numbers: AsyncScalars  # `loss`, `grad_norm` and metrics of the task
    lr: float
    microbatches: Sequence[Batch]  # of this rank, without their tensors
    applied: bool = True  # off: the guard dropped the update
    epoch: float | None = None  # passes over the data, this step included; None: it does not tell how long it is


class Callback:
    """Base class of callbacks. No method does anything; override what you need. `name` keys the callback's state in
    the checkpoint."""

    @property
    def name(self) -> str:
        return type(self).__name__

    def on_start(self, trainer: TrainerHandle) -> None: ...

    def on_step_begin(self, trainer: TrainerHandle) -> None: ...

    def on_before_optim(self, trainer: TrainerHandle) -> None:
        """Look at gradients: they are those of the loss, unclipped; clipping is part of the update that follows."""

    def on_step_end(self, trainer: TrainerHandle, result: StepResult) -> None: ...

    def on_eval(self, trainer: TrainerHandle, metrics: dict[str, float]) -> None: ...

    def on_save(self, trainer: TrainerHandle, path: Path) -> None: ...

    def on_rewind(self, trainer: TrainerHandle) -> None:
        """React to a rewind: training went back to `trainer.step`, and later steps will happen again."""

    def on_error(self, trainer: TrainerHandle, error: BaseException) -> None: ...

    def on_end(self, trainer: TrainerHandle) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def state_tensors(self, trainer: TrainerHandle) -> dict[str, Tensor]:
        """Return the callback's own tensors for the checkpoint, by name; a resume fills them in place."""
        return {}


# The fate of the update of a step; "rewound": the step was undone.
StepOutcome = Literal["applied", "dropped", "rewound"]


class OptimizerStep(Callback):
    """Apply the update of every step. The subclass in `observe.anomaly` may drop it after a look at the step."""

    lr_factor = 1.0  # times the learning rate that the schedule gives

    def update(
        self, trainer: TrainerHandle, loss: Tensor, grad_norm: Tensor, microbatches: Sequence[Batch]
    ) -> StepOutcome:
        trainer.optimizer.step()
        return "applied"

    def check_trained(self, trainer: TrainerHandle) -> None:
        """Raise after the last step if the run has trained nothing."""


def check_callback_names(callbacks: Sequence[Callback]) -> None:
    """Raise if two callbacks would keep their states in the checkpoint under one name, or if one is no callback."""
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise TesseraError(
                f"{callback!r} is no callback",
                where="callbacks",
                fix="give an object of a class derived from tessera.core.callback.Callback",
            )
    names = [callback.name for callback in callbacks if type(callback).state_dict is not Callback.state_dict]
    for name in names:
        if names.count(name) > 1:
            raise TesseraError(
                f"{names.count(name)} callbacks keep state in the checkpoint under the name {name}",
                where="callbacks",
                fix="give one of them another `name` (a property of its class)",
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
