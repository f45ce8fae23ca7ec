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
from tessera.core.engine import TrainingEngine
from tessera.core.step_source import StepSource
from tessera.core.task import Task
from tessera.runtime import device as devices
from tessera.runtime.distributed import World


class TrainerHandle(Protocol):
    """Declare the members of the trainer that a callback may use (`tessera.training.trainer.Trainer`)."""

    step: int  # optimizer steps done
    phase: str  # what the trainer is doing now; watchdog threads read it
    phase_listeners: list[Callable[[str], None]]  # called with the new phase whenever it changes
    stop_reason: str | None  # argument of `request_stop`; None: no stop was requested
    paused_seconds: float  # seconds spent on evaluation and saving

    # ---- the run

    @property
    def config(self) -> RunConfig: ...

    @property
    def length(self) -> RunLength: ...

    @property
    def rows_drawn(self) -> int:
        """Return the number of rows that all steps so far have used."""
        ...

    @property
    def data_seconds(self) -> float:
        """Return the seconds that the trainer has waited for data since the start."""
        ...

    @property
    def world(self) -> World: ...

    # ---- its parts

    @property
    def module(self) -> nn.Module: ...

    @property
    def engine(self) -> TrainingEngine: ...

    @property
    def task(self) -> Task: ...

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    @property
    def steps(self) -> StepSource: ...

    @property
    def eval_weights(self) -> Callable[[], AbstractContextManager[None]]:
        """Return a function that makes a context manager: inside of it the module has the weights to evaluate.

        These are, for example, the EMA weights.
        """
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Return weights and optimizer state of this rank, by their names in a checkpoint."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return all state of the run except tensors, in the form of a checkpoint's `state.json`."""
        ...

    # ---- requests

    def request_stop(self, reason: str) -> None:
        """Finish this step, save unless `checkpoint.at_end` is off, and end the run. It can be resumed."""

    def request_save(self) -> None:
        """Save after this step. All ranks call this at the same step."""

    def end_early(self, reason: str) -> None:
        """End the run as if this step were its last. All ranks call this at the same step."""

    def report_eval(self, metrics: dict[str, float]) -> None:
        """Call `on_eval` of all callbacks."""

    def save(self) -> Path | None:
        """Save a checkpoint of this step and wait until it is written; return None if this step is already saved."""

    def paused(self, phase: str) -> AbstractContextManager[None]:
        """Return a context whose time does not count as training."""
        ...


class RewindHandle(TrainerHandle, Protocol):
    """Declare members of the trainer with which `OptimizerStep.update` may return to an earlier state."""

    def begin(self) -> None:
        """Fill the model with its initial weights."""

    def resume(self, before: int | None = None) -> bool:
        """Load the newest undamaged checkpoint; return False if none exists. `before`: only of steps below this one."""
        ...

    def restore_state(self, step: int, state: Mapping[str, Any]) -> None:
        """Restore all state except tensors from the result of `state_dict`."""

    def continue_from_here(self) -> None:
        """Call `on_rewind` of all callbacks, and continue the data after the current step."""


class AsyncScalars:
    """Copy named scalars to the host while the device continues to compute.

    Calling the object returns them. It waits for the copy, but not for kernels that were queued after it.
    """

    def __init__(self, names: Sequence[str], conditions: Sequence[str], copy: devices.HostCopy) -> None:
        self._names, self._conditions, self._copy = names, conditions, copy

    @staticmethod
    def of(numbers: Mapping[str, Tensor], counted: Mapping[str, Tensor] | None = None) -> AsyncScalars:
        """Begin to copy scalars to the host. `counted`: name -> a flag on the device, false to leave the scalar out."""
        conditions = counted or {}
        wide = devices.sum_dtype(next(iter(numbers.values())).device)
        stacked = torch.stack([number.detach().to(wide) for number in (*numbers.values(), *conditions.values())])
        return AsyncScalars(list(numbers), list(conditions), devices.HostCopy(stacked))

    def __call__(self) -> dict[str, float]:
        values = self._copy()
        exists = dict(zip(self._conditions, values[len(self._names) :], strict=True))
        return {name: value for name, value in zip(self._names, values, strict=False) if exists.get(name, 1.0)}

    def ready(self) -> bool:
        """Return whether the copy is finished, so that a call does not wait."""
        return self._copy.ready()


@dataclass(frozen=True)
class StepResult:
    """Describe one finished optimizer step."""

    step: int  # number of finished steps, including this one
    numbers: AsyncScalars  # `loss`, `grad_norm` and metrics of the task
    lr: float
    microbatches: Sequence[Batch]  # micro-batches of this rank, without their tensors
    applied: bool = True  # False: the guard skipped the update
    epoch: float | None = None  # passes over the data, including this step; None: the length of the data is unknown


class Callback:
    """Base class of callbacks. Its methods do nothing. `name` is the key of the callback's state in checkpoints."""

    @property
    def name(self) -> str:
        return type(self).__name__

    def on_start(self, trainer: TrainerHandle) -> None: ...

    def on_step_begin(self, trainer: TrainerHandle) -> None: ...

    def on_before_optim(self, trainer: TrainerHandle) -> None:
        """Run after backward, before gradients are clipped."""

    def on_step_end(self, trainer: TrainerHandle, result: StepResult) -> None: ...

    def on_eval(self, trainer: TrainerHandle, metrics: dict[str, float]) -> None: ...

    def on_save(self, trainer: TrainerHandle, path: Path) -> None: ...

    def on_rewind(self, trainer: TrainerHandle) -> None:
        """React to a rewind: training went back to `trainer.step`, and later steps will be repeated."""

    def on_error(self, trainer: TrainerHandle, error: BaseException) -> None: ...

    def on_end(self, trainer: TrainerHandle) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def state_tensors(self, trainer: TrainerHandle) -> dict[str, Tensor]:
        """Return the tensors of this callback that checkpoints store, by name.

        A resume copies the stored values into these tensors.
        """
        return {}


# Result of a step: its update was applied or skipped, or the run returned to an earlier step.
StepOutcome = Literal["applied", "dropped", "rewound"]


class OptimizerStep(Callback):
    """Apply the optimizer's update at each step. The subclass in `observe.anomaly` first checks it, and may drop it."""

    def update(
        self, trainer: RewindHandle, loss: Tensor, grad_norm: Tensor, microbatches: Sequence[Batch]
    ) -> StepOutcome:
        trainer.optimizer.step()
        return "applied"

    def check_trained(self, trainer: TrainerHandle) -> None:
        """Raise after the last step if the run has trained nothing."""
