"""Layers one after another on several ranks: the engine that runs torch's schedules over the stages of a model.

Torch's schedules cut *tensors* into micro-batches; ours are ragged and no tensors. So what they cut are numbers, 0 to
M - 1, and each stage looks its micro-batch up by number. Between stages only carries travel, which have one shape.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from tessera.core.errors import TesseraError
from tessera.core.types import Batch, LossOut, Reference, Task
from tessera.parallel.axes import LOSS, PP
from tessera.parallel.engine import detached, reduce_losses
from tessera.parallel.mesh import Mesh
from tessera.parallel.pipeline.chain import Chain
from tessera.parallel.pipeline.order import CLASSES, SINGLE
from tessera.parallel.pipeline.stages import Stage, Stages, cut_stages
from tessera.parallel.pipeline.tied import TiedCopies
from tessera.parallel.plan import Plan
from tessera.parallel.shared import EndOfStep, sum_shared

__all__ = ["PipelineEngine", "QuietStage", "Stage", "Stages", "cut_stages"]


@dataclass
class _Loss:
    """Forward of one micro-batch on one stage; the last stage ends with the loss."""

    task: Task
    microbatches: Sequence[Batch]
    output_dtype: torch.dtype | None  # of what the whole model returns
    # By micro-batch, on the rank of the last stage: what a reference made of it.
    references: list[dict[str, Tensor]] = field(default_factory=list)
    found: list[LossOut] = field(default_factory=list)  # on the rank of the last stage

    def __call__(self, stage: Stage, carry: Tensor | None, mb: int) -> Tensor:
        with torch.no_grad():
            batch = self.task.inputs(self.microbatches[mb])
        out = stage.run(batch, carry)
        if not stage.is_last:
            handed: Tensor = out
            return handed
        if self.references:
            batch.tensors.update(self.references[mb])
        loss = self.task.loss(_typed(out, self.output_dtype), batch)
        self.found.append(detached(loss))
        return loss.sum


@dataclass
class _Compare:
    """Forward of one micro-batch through the reference of a task, on one stage."""

    task: Task
    reference: Reference
    batch: Batch
    output_dtype: torch.dtype | None

    def __call__(self, stage: Stage, carry: Tensor | None, mb: int) -> Any:
        batch = self.task.inputs(self.batch)
        out = stage.run(batch, carry)
        return self.reference.seen(_typed(out, self.output_dtype), batch) if stage.is_last else out


def _typed(out: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return out
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, out)


@dataclass
class _Padded:
    """The same for torch's schedules, which want carries of one shape and type."""

    work: _Loss
    rows: Sequence[int]  # by stage
    dtype: torch.dtype

    def __call__(self, stage: Stage, carry: Tensor | None, mb: int) -> Tensor:
        out = self.work(stage, carry, mb)
        if stage.is_last:
            return out
        missing = self.rows[stage.number] - out.shape[0]
        assert missing >= 0, f"stage {stage.number} hands on {out.shape[0]} rows, more than {self.rows[stage.number]}"
        out = F.pad(out, (0, 0, 0, missing)) if missing else out
        return out.to(self.dtype)


class QuietStage(PipelineStage):
    """Releases of torch before 2.13 begin by greeting the neighbours of each stage. In a schedule that comes back to
    where it began, a neighbour may be the same rank, and not every backend can send to itself."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        found: list[dist.P2POp] = super()._get_init_p2p_neighbors_ops()
        return [greeting for greeting in found if greeting.group_peer != self.group_rank]


class PipelineEngine:
    stage_class: type[PipelineStage] = QuietStage

    def __init__(
        self, stages: Stages, plan: Plan, mesh: Mesh, device: torch.device, shared: Sequence[EndOfStep] = ()
    ) -> None:
        assert plan.pipeline is not None
        self.stages = stages
        self.plan = plan
        self.pipeline = plan.pipeline
        self.device = device
        self.shared = shared
        self.pp_group = mesh.group(PP)
        self.loss_group = mesh.group(LOSS)
        self.tied = TiedCopies(stages, plan.pipeline, mesh)
        self._chain = Chain(stages, plan, mesh, device)
        self._schedule: Any = None  # made with the first step, when the number of this rank's tokens is known
        self._rows: list[int] = []
        self._metrics: list[str] | None = None  # names that the last stage's rank told the others
        for stage in stages:
            # Before anything else sees it: fully_shard would move the number to the device, and reading it would wait.
            stage.register_forward_pre_hook(self._number_on_host, prepend=True, with_kwargs=True)

    def step(self, task: Task, microbatches: Sequence[Batch]) -> LossOut:
        count = self.pipeline.microbatches
        assert len(microbatches) == count, f"{len(microbatches)} micro-batches, planned were {count}"
        if self._schedule is None:
            self._schedule = self._make_schedule(microbatches[0])
        work = _Loss(task, microbatches, self.plan.output_dtype, self._references(task, microbatches))
        here = self.stages.here()
        for stage in here.values():
            stage.work = _Padded(work, self._rows, self.plan.param_dtype)
        self._run_schedule(torch.arange(count), here)
        for stage in here.values():
            stage.work = None  # let go of the micro-batches
        sum_shared(self.shared)
        self.tied.sum_gradients()
        return self._reduce(work.found)

    def _run_schedule(self, numbers: Tensor, here: Collection[int]) -> None:
        first = (numbers,) if 0 in here else ()
        last = len(self.pipeline.stages) - 1 in here
        try:
            self._schedule.step(*first, target=numbers if last else None, mb=numbers, return_outputs=False)
        except RuntimeError as error:
            if isinstance(error.__cause__, TesseraError):  # torch wraps what a stage says into words of its own
                raise error.__cause__ from None
            raise

    @torch.no_grad()
    def evaluate(self, task: Task, batch: Batch, counts: bool) -> LossOut:
        self.stages.eval()
        try:
            work = _Loss(task, [batch], self.plan.output_dtype, self._references(task, [batch]))
            self._chain.run(work)
        finally:
            self.stages.train()
        return self._reduce(work.found if counts else [detached(out, scale=0.0) for out in work.found])

    @torch.no_grad()
    def _references(self, task: Task, microbatches: Sequence[Batch]) -> list[dict[str, Tensor]]:
        """One micro-batch after another, each through all stages; empty but on the rank of the last one."""
        reference: Reference | None = getattr(task, "reference", None)
        if reference is None:
            return []
        with reference.of(self.stages):
            seen = [self._chain.run(_Compare(task, reference, batch, self.plan.output_dtype)) for batch in microbatches]
        return [one for one in seen if one is not None]

    def settle(self, optimizer: Optimizer) -> None:
        self.tied.settle(optimizer)

    def _reduce(self, found: Sequence[LossOut]) -> LossOut:
        """Only the last stage knows a loss; in the end all ranks do."""
        if self._metrics is None:
            self._metrics = self.agree_on_metrics(sorted(found[0].metrics) if found else None)
        if not found:
            zero = torch.zeros((), device=self.device)
            found = [LossOut(zero, zero, dict.fromkeys(self._metrics, zero))]
        return reduce_losses(found, self.loss_group)

    # ------------------------------------------------------------------------------------------ read on the host

    def agree_on_metrics(self, names: list[str] | None) -> list[str]:
        """What the last stage's rank reports besides the loss; the others have no names to offer."""
        told: list[Any] = [names]
        dist.broadcast_object_list(told, group=self.pp_group, group_src=self.pipeline.owner[-1])
        return list(told[0])

    def number_of(self, mb: Tensor) -> int:
        return int(mb)

    def _number_on_host(
        self, stage: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any] | None:
        if "mb" not in kwargs:
            return None
        carry = None if stage.is_first else args[0]
        return (carry, self.number_of(kwargs["mb"])), {}

    # ------------------------------------------------------------------------------------------ torch's objects

    def _make_schedule(self, batch: Batch) -> Any:
        tokens = batch.get("tokens")
        of_rank = self.pipeline.tokens if tokens is None else tokens.shape[0]
        for planned in self.pipeline.stages:
            per_token = 0 if planned.hands_on is None else planned.hands_on.rows_per_token
            self._rows.append(per_token * (self.pipeline.tokens if planned.media else of_rank))
        count = len(self.pipeline.stages)
        made = [
            self.stage_class(
                stage,
                stage.number,
                count,
                self.device,
                # Said beforehand, so that torch need not run the model to find out.
                input_args=self._carry(stage.number - 1),
                output_args=self._carry(stage.number),
                dw_builder=_nothing_left if stage.number in self.pipeline.unsplit else None,
                group=self.pp_group,
            )
            for stage in self.stages
        ]
        kind = CLASSES[self.pipeline.schedule]
        subject = made[0] if self.pipeline.schedule in SINGLE else made
        return kind(subject, self.pipeline.microbatches, loss_fn=_loss_as_it_is, scale_grads=False)

    def _carry(self, stage: int) -> Tensor:
        """The likeness of what a stage hands on: -1 stands for what comes in, a number; the last one gives a loss."""
        if stage < 0:
            return torch.empty(1, dtype=torch.int64, device="meta")
        carry = self.pipeline.stages[stage].hands_on
        if carry is None:
            return torch.empty((), device="meta", requires_grad=True)
        shape = (self._rows[stage], carry.width)
        trained = self.pipeline.needs_gradient(stage, self.plan.pieces)
        return torch.empty(shape, dtype=self.plan.param_dtype, device="meta", requires_grad=trained)


def _nothing_left() -> Callable[[], None]:
    """For a stage whose backward computes all gradients at once: what it does when the turn of the weights comes."""
    return lambda: None


def _loss_as_it_is(loss: Tensor, target: Tensor) -> Tensor:
    return loss
