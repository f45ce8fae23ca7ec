"""Side jobs of a run. A callback hears nine moments and may keep state of its own, plain JSON and tensors, in the
checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from tessera.core import device as devices
from tessera.core.types import Batch

if TYPE_CHECKING:
    from pathlib import Path

    from tessera.train.trainer import Trainer


class Look:
    """Named numbers on their way to the host: calling it waits for them. See `begin_look`."""

    def __init__(self, names: Sequence[str], copy: devices.HostCopy) -> None:
        self._names, self._copy = names, copy

    def __call__(self) -> dict[str, float]:
        return dict(zip(self._names, self._copy(), strict=True))

    def ready(self) -> bool:
        """Return whether a call would not have to wait."""
        return self._copy.ready()


def begin_look(numbers: Mapping[str, Tensor]) -> Look:
    """Sends numbers to the host. Calling the result waits for them and not for what the device is told to do later:
    begun before an update is queued, a look at the loss does not leave the device idle behind that update."""
    wide = devices.sum_dtype(next(iter(numbers.values())).device)
    return Look(list(numbers), devices.look_at(torch.stack([number.detach().to(wide) for number in numbers.values()])))


@dataclass(frozen=True)
class StepResult:
    """One finished optimizer step."""

    step: int  # steps done, this one included
    numbers: Look  # `loss`, `grad_norm` and metrics of the task
    lr: float
    microbatches: Sequence[Batch]  # of this rank, without their tensors
    applied: bool = True  # off: the guard dropped the update


class Callback:
    """All moments do nothing; override what you need. `name` keys the callback's state in the checkpoint."""

    @property
    def name(self) -> str:
        return type(self).__name__

    def on_start(self, trainer: Trainer) -> None: ...

    def on_step_begin(self, trainer: Trainer) -> None: ...

    def on_before_optim(self, trainer: Trainer) -> None:
        """Gradients are of the loss summed over what is trained on; the update divides and clips them."""

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None: ...

    def on_eval(self, trainer: Trainer, metrics: dict[str, float]) -> None: ...

    def on_save(self, trainer: Trainer, path: Path) -> None: ...

    def on_rewind(self, trainer: Trainer) -> None:
        """Training went back to `trainer.step`: what was recorded of later steps will happen again."""

    def on_error(self, trainer: Trainer, error: BaseException) -> None: ...

    def on_end(self, trainer: Trainer) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def state_tensors(self, trainer: Trainer) -> dict[str, Tensor]:
        """Tensors of its own that belong into the checkpoint, by name; filled in place on a resume."""
        return {}


Fate = Literal["applied", "dropped", "rewound"]  # what became of a step's update; rewound: of the step as a whole


class Stepper(Callback):
    """Who applies a step's update. This one always does; `train.guard` looks at the step first."""

    lr_share = 1.0  # of the learning rate that the schedule gives

    def update(self, trainer: Trainer, loss: Tensor, grad_norm: Tensor, microbatches: Sequence[Batch]) -> Fate:
        trainer.optimizer.step()
        return "applied"
