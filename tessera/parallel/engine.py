"""An engine runs one optimizer step's forward and backward passes. The trainer does not know which engine it has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from tessera.core import device as devices
from tessera.core.dist import sum_over_ranks
from tessera.core.types import Batch, LossOut, Reference, Task
from tessera.parallel.shared import EndOfStep, sum_shared


class Engine(Protocol):
    def step(self, task: Task, microbatches: Sequence[Batch]) -> LossOut:
        """Leaves the gradient of the *summed* loss in the parameters; returns sums over all micro-batches and ranks."""
        ...

    def evaluate(self, task: Task, batch: Batch, counts: bool) -> LossOut:
        """Loss without gradient. With `counts` off, takes part in the collectives and adds nothing."""
        ...

    def settle(self, optimizer: torch.optim.Optimizer) -> None:
        """Called when weights and the optimizer's state were filled by name: what has no name of its own follows."""
        ...


class SimpleEngine:
    """Whole model on every rank (possibly sharded): micro-batches one after another, gradients accumulate.

    The loss is a sum, and its global count is known only after all ranks have run. So backward runs on the sum, and
    whoever clips divides by the count in the same pass: any split of a global batch gives the same gradient.
    """

    def __init__(
        self,
        module: nn.Module,
        accumulate: Literal["reduce", "local"] = "reduce",
        *,
        group: dist.ProcessGroup | None = None,  # whose losses add up; None: all ranks
        shared: Sequence[EndOfStep] = (),
    ) -> None:
        self.module = module
        self.accumulate = accumulate
        self.group = group
        self.shared = shared

    def step(self, task: Task, microbatches: Sequence[Batch]) -> LossOut:
        totals: list[LossOut] = []
        for number, batch in enumerate(microbatches):
            if self.accumulate == "local" and isinstance(self.module, FSDPModule):
                self.module.set_requires_gradient_sync(number == len(microbatches) - 1)
            out = self._forward(task, batch)
            out.sum.backward()
            totals.append(detached(out))
        sum_shared(self.shared)
        return reduce_losses(totals, self.group)

    @torch.no_grad()
    def evaluate(self, task: Task, batch: Batch, counts: bool) -> LossOut:
        self.module.eval()
        try:
            out = self._forward(task, batch)
        finally:
            self.module.train()
        return reduce_losses([out if counts else detached(out, scale=0.0)], self.group)

    def settle(self, optimizer: torch.optim.Optimizer) -> None:
        """Every parameter has a name here."""

    def _forward(self, task: Task, batch: Batch) -> LossOut:
        reference: Reference | None = getattr(task, "reference", None)
        with torch.no_grad():
            inputs = task.inputs(batch)
            if reference is not None:
                with reference.of(self.module):
                    inputs.tensors.update(reference.seen(self.module(inputs), inputs))
        return task.loss(self.module(inputs), inputs)


def detached(out: LossOut, scale: float = 1.0) -> LossOut:
    metrics = {name: value.detach() * scale for name, value in out.metrics.items()}
    return LossOut(out.sum.detach() * scale, out.count * scale, metrics)


def reduce_losses(parts: Sequence[LossOut], group: dist.ProcessGroup | None) -> LossOut:
    """One small all-reduce for loss, count and metrics; everything stays on the device."""
    names = sorted(parts[0].metrics)
    wide = devices.sum_dtype(parts[0].sum.device)
    rows = [torch.stack([t.to(wide) for t in (p.sum, p.count, *(p.metrics[n] for n in names))]) for p in parts]
    total = sum_over_ranks(torch.stack(rows).sum(0), group)
    return LossOut(total[0], total[1], {n: total[2 + i] for i, n in enumerate(names)})
