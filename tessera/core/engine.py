"""Define the interface of engines, which run the forward and backward passes of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from tessera.core.batch import Batch
from tessera.core.task import LossTotals, Task
from tessera.runtime.gradients import LossScale


class TrainingEngine(Protocol):
    """Compute losses and gradients. `SimpleEngine` and `PipelineEngine` of `tessera.parallel` implement it."""

    loss_scale: LossScale | None
    microbatch: int | None  # index of the current micro-batch; None if no micro-batch or several are being computed

    def encode(self, task: Task, microbatches: Sequence[Batch]) -> list[Batch]:
        """Return micro-batches with the outputs of frozen encoders. All ranks must call it."""
        ...

    def step(self, task: Task, microbatches: Sequence[Batch]) -> LossTotals:
        """Add the gradients of the loss to the parameters; return loss sums over all micro-batches and ranks."""
        ...

    def evaluate(self, task: Task, batch: Batch, counts: bool) -> LossTotals:
        """Return the losses without gradient. `counts` False: run all collectives, but count zeros for this rank."""
        ...

    def settle(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy weights and optimizer state, after loading, to their duplicates (a tied weight on another stage)."""
        ...

    def collect(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy trained duplicates of weights and optimizer state, if there are any, to the originals before saving."""
        ...
