"""Define what runs the forward and backward passes of a step. The trainer does not know which engine it has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from tessera.core.batch import Batch
from tessera.core.task import LossTotals, Task
from tessera.runtime.gradients import LossScale


class Engine(Protocol):
    """Compute losses and gradients. `SimpleEngine` and `PipelineEngine` of `tessera.parallel` implement it."""

    loss_scale: LossScale | None
    microbatch: int | None  # number of the one that is being computed; None: none, or several at once

    def encode(self, task: Task, microbatches: Sequence[Batch]) -> list[Batch]:
        """Return micro-batches with the outputs of frozen encoders. All ranks take part."""
        ...

    def step(self, task: Task, microbatches: Sequence[Batch]) -> LossTotals:
        """Leave the gradient of the loss in the parameters; return sums over all micro-batches and ranks."""
        ...

    def evaluate(self, task: Task, batch: Batch, counts: bool) -> LossTotals:
        """Return the losses without gradient. With `counts` off, take part in the collectives and add nothing."""
        ...

    def settle(self, optimizer: torch.optim.Optimizer) -> None:
        """Complete the state after weights and optimizer were filled by name: copies of tied weights share a name."""
        ...
