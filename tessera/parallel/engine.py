"""Run the forward and backward passes of an optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tessera.core.batch import Batch
from tessera.core.task import Counts, Losses, LossTotals, SumSpec, Task
from tessera.errors import TesseraError
from tessera.parallel.collectives import PostBackward
from tessera.runtime import device as devices
from tessera.runtime.distributed import sum_over_ranks
from tessera.runtime.gradients import LossScale, scale_gradients


class SimpleEngine:
    """Run micro-batches one after another without a pipeline, and accumulate their gradients."""

    def __init__(
        self,
        module: nn.Module,
        accumulate: Literal["reduce", "local"] = "reduce",
        *,
        device: torch.device | str = "cpu",
        group: dist.ProcessGroup | None = None,  # ranks whose losses are summed; None: all ranks
        loss_scale: LossScale | None = None,
        shared: Sequence[PostBackward] = (),
    ) -> None:
        self.module = module
        self.device = torch.device(device)
        self.accumulate = accumulate
        self.group = group
        self.shared = shared
        self.loss_scale = loss_scale
        self.microbatch: int | None = None

    @torch.no_grad()
    def encode(self, task: Task, microbatches: Sequence[Batch]) -> list[Batch]:
        return task.encode(microbatches)

    def step(self, task: Task, microbatches: Sequence[Batch]) -> LossTotals:
        counts = global_counts(task, microbatches, self.device, self.group)
        computed: list[Losses] = []
        for number, batch in enumerate(microbatches):
            self.microbatch = number
            if self.accumulate == "local" and isinstance(self.module, FSDPModule):
                self.module.set_requires_gradient_sync(number == len(microbatches) - 1)
            losses = self._forward(task, batch)
            scaled_loss(losses, counts, self.loss_scale).backward()
            computed.append(detached(losses))
        self.microbatch = None
        for shared in self.shared:
            shared.run()
        totals = reduce_losses(computed, specs_of(computed[0]), counts, self.device, self.group)
        finish_gradients(self.module, totals, counts, self.loss_scale)
        return totals

    @torch.no_grad()
    def evaluate(self, task: Task, batch: Batch, counts: bool) -> LossTotals:
        self.module.eval()
        try:
            losses = self._forward(task, batch)
        finally:
            self.module.train()
        total = global_counts(task, [batch], self.device, self.group, counts)
        return reduce_losses([losses] if counts else [], specs_of(losses), total, self.device, self.group)

    def settle(self, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: only `PipelineEngine` has copies of tied weights, which it updates here."""

    def collect(self, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: the optimizer updates the weights of the module, not copies of them."""

    def _forward(self, task: Task, batch: Batch) -> Losses:
        reference = task.reference
        with torch.no_grad():
            inputs = task.model_inputs(*self.encode(task, [batch]))
            if reference is not None:
                with reference.active(self.module):
                    inputs = inputs.with_tensors(**reference.tensors(task.forward(self.module, inputs), inputs))
        return task.losses(task.forward(self.module, inputs), inputs)


# ---------------------------------------------------------------------------------------------- counts and sums


def global_counts(
    task: Task,
    microbatches: Sequence[Batch],
    device: torch.device,
    group: dist.ProcessGroup | None,
    contributes: bool = True,
) -> dict[str, Tensor] | None:
    """Return `Task.counts`, the numbers of tokens or samples that loss terms are averaged over, for the whole step.

    They are summed over micro-batches and ranks. `contributes`: whether this rank's micro-batches are included. Return
    None if the task counts only after forward.
    """
    by_batch = [task.counts(batch) for batch in microbatches]
    if by_batch[0] is None:
        return None
    names = sorted(by_batch[0])
    per_batch = [counts for counts in by_batch if counts is not None]
    for counts in per_batch:
        if sorted(counts) != names:
            raise TesseraError(
                f"{type(task).__name__}.counts returned {sorted(counts)} for one micro-batch and {names} for another",
                where="train.task",
                fix="return every count for every batch, 0 where there is nothing to count",
                code="task.counts-differ",
            )
    return _summed_counts(names, per_batch if contributes else [], device, group)


def _summed_counts(
    names: Sequence[str], per_batch: Sequence[Counts], device: torch.device, group: dist.ProcessGroup | None
) -> dict[str, Tensor]:
    on_host = dict.fromkeys(names, 0.0)
    total = torch.zeros(len(names), dtype=devices.sum_dtype(device), device=device)
    for counts in per_batch:
        for at, name in enumerate(names):
            count = counts[name]
            if isinstance(count, Tensor):
                total[at] += count.detach().to(total)
            else:
                on_host[name] += count
    total += devices.send(list(on_host.values()), total.dtype, device)
    total = sum_over_ranks(total, group)
    return dict(zip(names, total.unbind(), strict=True))


def scaled_loss(losses: Losses, counts: dict[str, Tensor] | None, loss_scale: LossScale | None) -> Tensor:
    """Return the loss of a micro-batch for backward: each term divided by its global count, unless counts are None."""
    if not isinstance(losses, Losses):
        raise TesseraError(
            f"`losses` of the task returned a {type(losses).__name__}",
            where="train.task",
            allowed=["tessera.core.task.Losses"],
            fix="return Losses([LossTerm(name, sum, count)])",
            code="task.losses-type",
        )
    parts = []
    for term in losses.terms:
        factor = term.weight if counts is None else (term.weight / _count_of(term.count, counts).clamp(min=1))
        parts.append(term.sum * (factor.to(term.sum.dtype) if isinstance(factor, Tensor) else factor))
    loss: Tensor = sum(parts[1:], start=parts[0])
    return loss if loss_scale is None else loss_scale.scaled(loss)


def _count_of(name: str, counts: dict[str, Tensor]) -> Tensor:
    if name not in counts:
        raise TesseraError(
            f"a loss term is divided by the count {name!r}, which `counts` of the task does not return",
            where="train.task",
            allowed=counts,
            code="task.unknown-count",
        )
    return counts[name]


def specs_of(losses: Losses) -> tuple[SumSpec, ...]:
    """Return the name of each loss term and metric, and the name of its count, in the same order on all ranks."""
    terms = [SumSpec(term.name, term.count, term.weight) for term in losses.terms]
    return (*terms, *(SumSpec(name, losses.metrics[name].count) for name in sorted(losses.metrics)))


def detached(losses: Losses) -> Losses:
    """Return the losses without the autograd graph."""
    terms = [type(term)(term.name, term.sum.detach(), term.count, term.weight) for term in losses.terms]
    return Losses(terms, losses.metrics, losses.counts)


def reduce_losses(
    microbatches: Sequence[Losses],
    specs: tuple[SumSpec, ...],
    counts: dict[str, Tensor] | None,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> LossTotals:
    """Sum terms and metrics over micro-batches and ranks, without waiting for the device.

    One all-reduce sums them. If `counts` is None, another one sums the counts (of tokens or samples) of the batches.
    """
    wide = devices.sum_dtype(device)
    total = torch.zeros(len(specs), dtype=wide, device=device)
    for losses in microbatches:
        by_name = {term.name: term.sum for term in losses.terms} | {n: m.sum for n, m in losses.metrics.items()}
        total = total + torch.stack([by_name[spec.name].detach().to(total) for spec in specs])
    if counts is None:
        names = sorted({spec.count for spec in specs})
        if len(names) > 1:
            raise TesseraError(
                f"the loss terms and metrics are averaged over different counts ({', '.join(names)}), "
                "and `Task.counts` returned None",
                where="train.task",
                fix="return all of these counts from `Task.counts(batch)`, which runs before the model",
                code="task.counts-too-late",
            )
        per_batch = [losses.counts for losses in microbatches if losses.counts is not None]
        counts = _summed_counts(names, per_batch, device, group)
    return LossTotals(specs, sum_over_ranks(total, group), counts)


def finish_gradients(
    module: nn.Module, totals: LossTotals, counts: dict[str, Tensor] | None, loss_scale: LossScale | None
) -> None:
    """Divide gradients by the loss scale, and by the count if `Task.counts` returned None."""
    if counts is None:
        (count,) = totals.counts.values()
        scale_gradients((p.grad for p in module.parameters()), 1.0 / count.clamp(min=1))
    if loss_scale is not None:
        loss_scale.unscale(module.parameters())
