"""Run torch's pipeline schedules over the stages of a model.

Torch's schedules split a tensor into micro-batches, but micro-batches here are `Batch` objects of different shapes. So
a tensor with the indices 0 to M - 1 is split, and each stage looks up its micro-batch by index. A stage sends one
activation of constant shape to the next, which is called `carry`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from tessera.core.batch import Batch
from tessera.core.task import Losses, LossTotals, Reference, SumSpec, Task
from tessera.errors import TesseraError
from tessera.parallel.collectives import PostBackward
from tessera.parallel.engine import (
    detached,
    finish_gradients,
    global_counts,
    reduce_losses,
    scaled_loss,
    specs_of,
)
from tessera.parallel.frozen import encode_on_one_rank
from tessera.parallel.mesh import LOSS, PP, Mesh
from tessera.parallel.pipeline_schedule import SINGLE, schedule_class
from tessera.parallel.pipeline_stages import LocalStages, SequentialStages, StageModule, TiedCopies
from tessera.parallel.plan import Plan
from tessera.runtime.gradients import LossScale
from tessera.runtime.torch_internals import self_loop_stage, tree_map_only


@dataclass
class _Loss:
    """Run one micro-batch through one stage. On the last stage, also compute and store its loss."""

    task: Task
    microbatches: Sequence[Batch]
    counts: dict[str, Tensor] | None  # `Task.counts` summed over all ranks and micro-batches
    loss_scale: LossScale | None
    output_dtype: torch.dtype | None  # dtype to cast the output of the last stage to
    # For each micro-batch, the tensors that `Task.reference` computed, such as log-probabilities. Last stage only.
    references: list[dict[str, Tensor]] = field(default_factory=list)
    losses: list[Losses] = field(default_factory=list)  # one per micro-batch, on the last stage only

    def __call__(self, stage: StageModule, carry: Tensor | None, mb: int) -> Tensor:
        with torch.no_grad():
            batch = self.task.model_inputs(self.microbatches[mb])
        out = stage.run(batch, carry)
        if not stage.is_last:
            activation: Tensor = out
            return activation
        if self.references:
            batch = batch.with_tensors(**self.references[mb])
        losses = self.task.losses(_typed(out, self.output_dtype), batch)
        loss = scaled_loss(losses, self.counts, self.loss_scale)
        self.losses.append(detached(losses))
        return loss


@dataclass
class _Compare:
    """Run one micro-batch through one stage of a task's reference model (`Task.reference`)."""

    task: Task
    reference: Reference
    batch: Batch
    output_dtype: torch.dtype | None

    def __call__(self, stage: StageModule, carry: Tensor | None, mb: int) -> Any:
        batch = self.task.model_inputs(self.batch)
        out = stage.run(batch, carry)
        return self.reference.tensors(_typed(out, self.output_dtype), batch) if stage.is_last else out


def _typed(out: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return out
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, out)


@dataclass
class _Padded:
    """Pad the output of a stage: torch's schedules need activations of one shape and dtype."""

    work: _Loss
    elements: Sequence[int]  # stage index -> size of the first dimension after padding
    dtype: torch.dtype

    def __call__(self, stage: StageModule, carry: Tensor | None, mb: int) -> Tensor:
        out = self.work(stage, carry, mb)
        if stage.is_last:
            return out
        missing = self.elements[stage.number] - out.shape[0]
        assert missing >= 0, (
            f"stage {stage.number} sends {out.shape[0]} vectors, more than the planned {self.elements[stage.number]}"
        )
        out = F.pad(out, (0, 0, 0, missing)) if missing else out
        return out.to(self.dtype)


class PipelineEngine:
    stage_class = staticmethod(self_loop_stage)  # a function instead of the class, whose import is slow

    def __init__(
        self,
        stages: LocalStages,
        plan: Plan,
        mesh: Mesh,
        device: torch.device,
        shared: Sequence[PostBackward] = (),
        loss_scale: LossScale | None = None,
    ) -> None:
        assert plan.layout.pipeline is not None
        self.stages = stages
        self.plan = plan
        self.pipeline = plan.layout.pipeline
        self.device = device
        self.shared = shared
        self.loss_scale = loss_scale
        self.microbatch: int | None = None  # always None: a pipeline computes several micro-batches at a time
        self.pp_group = mesh.group(PP)
        self.loss_group = mesh.group(LOSS)
        self.tied = TiedCopies(stages, self.pipeline, mesh)
        self._sequential = SequentialStages(stages, plan, mesh, device)
        self._schedule: Any = None  # made in the first step, when the number of tokens is known
        self._elements: list[int] = []
        self._specs: tuple[SumSpec, ...] | None = None  # names of loss terms and metrics
        for stage in stages:
            # Run before FSDP's hook, which moves inputs to the device: then reading the micro-batch index would block.
            stage.register_forward_pre_hook(self._number_on_host, prepend=True, with_kwargs=True)

    @torch.no_grad()
    def encode(self, task: Task, microbatches: Sequence[Batch]) -> list[Batch]:
        """Return micro-batches with the outputs of frozen encoders. If a frozen component is placed on one stage, the
        first stage encodes and sends the outputs to the other stages."""
        if all(part.position is None for part in self.plan.memory.frozen.values()):
            return task.encode(microbatches)
        assert self.pp_group is not None, "several ranks"
        return encode_on_one_rank(task, microbatches, self.pp_group, self.pipeline.owner[0], self.device)

    def step(self, task: Task, microbatches: Sequence[Batch]) -> LossTotals:
        if task.encode_steps == 1:  # if it is above 1, the loader has encoded the micro-batches already
            microbatches = self.encode(task, microbatches)
        count = self.pipeline.microbatches
        assert len(microbatches) == count, f"{len(microbatches)} micro-batches, planned were {count}"
        if self._schedule is None:
            self._schedule = self._make_schedule(microbatches[0])
        here = self.stages.here()
        counts = self._counts(task, microbatches, here)
        references = self._references(task, microbatches)
        work = _Loss(task, microbatches, counts, self.loss_scale, self.plan.precision.output, references)
        for stage in here.values():
            stage.work = _Padded(work, self._elements, self.plan.precision.compute)
        self._run_schedule(torch.arange(count), here)
        for stage in here.values():
            stage.work = None  # free the micro-batches
        for shared in self.shared:
            shared.run()
        self.tied.sum_gradients()
        totals = self._reduce(work.losses, counts)
        finish_gradients(self.stages, totals, counts, self.loss_scale)
        return totals

    def _counts(
        self, task: Task, microbatches: Sequence[Batch], here: Collection[int], counts: bool = True
    ) -> dict[str, Tensor] | None:
        """Return the global counts. All stages have the same micro-batches, so only the last stage contributes."""
        last = len(self.pipeline.stages) - 1 in here
        return global_counts(task, microbatches, self.device, self.loss_group, counts and last)

    def _run_schedule(self, numbers: Tensor, here: Collection[int]) -> None:
        first = (numbers,) if 0 in here else ()
        last = len(self.pipeline.stages) - 1 in here
        try:
            self._schedule.step(*first, target=numbers if last else None, mb=numbers, return_outputs=False)
        except RuntimeError as error:
            if isinstance(error.__cause__, TesseraError):  # torch wraps the error of a stage in a RuntimeError
                raise error.__cause__ from None
            raise

    @torch.no_grad()
    def evaluate(self, task: Task, batch: Batch, counts: bool) -> LossTotals:
        (batch,) = self.encode(task, [batch])
        self.stages.eval()
        try:
            total = self._counts(task, [batch], self.stages.here(), counts)
            work = _Loss(
                task, [batch], total, self.loss_scale, self.plan.precision.output, self._references(task, [batch])
            )
            self._sequential.run(work)
        finally:
            self.stages.train()
        return self._reduce(work.losses, total, counts)

    @torch.no_grad()
    def _references(self, task: Task, microbatches: Sequence[Batch]) -> list[dict[str, Tensor]]:
        """Return what `Task.reference` computes for each micro-batch; [] on ranks without the last stage."""
        reference = task.reference
        if reference is None:
            return []
        with reference.active(self.stages):
            references = [
                self._sequential.run(_Compare(task, reference, batch, self.plan.precision.output))
                for batch in microbatches
            ]
        return [reference for reference in references if reference is not None]

    def settle(self, optimizer: Optimizer) -> None:
        self.tied.settle(optimizer)

    def collect(self, optimizer: Optimizer) -> None:
        """Do nothing: the optimizer updates tied weights and their copies alike."""

    def _reduce(self, losses: Sequence[Losses], counts: dict[str, Tensor] | None, counted: bool = True) -> LossTotals:
        """Sum losses over ranks. Ranks without the last stage add zeros, and get the result as well."""
        if self._specs is None:
            self._specs = self.agree_on_specs(specs_of(losses[0]) if losses else None)
        return reduce_losses(losses if counted else [], self._specs, counts, self.device, self.loss_group)

    # ------------------------------------------------------------------------------------------ read on the host

    def agree_on_specs(self, specs: tuple[SumSpec, ...] | None) -> tuple[SumSpec, ...]:
        """Broadcast the names of loss terms and metrics from the rank of the last stage: other ranks have no losses."""
        shared: list[Any] = [None if specs is None else [astuple(spec) for spec in specs]]
        dist.broadcast_object_list(shared, group=self.pp_group, group_src=self.pipeline.owner[-1])
        return tuple(SumSpec(*fields) for fields in shared[0])

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
        main = self.pipeline.main
        of_rank = self.pipeline.tokens if main is None else main.elements(batch)
        for planned in self.pipeline.stages:
            per_token = 0 if planned.output is None else planned.output.per_token
            self._elements.append(per_token * (self.pipeline.tokens if planned.in_encoder else of_rank))
        count = len(self.pipeline.stages)
        stage_class = self.stage_class()
        stages = [
            stage_class(
                stage,
                stage.number,
                count,
                self.device,
                # Without these shapes, torch would run the model to infer them.
                input_args=self._carry(stage.number - 1),
                output_args=self._carry(stage.number),
                dw_builder=_nothing_left if stage.number in self.pipeline.unsplit else None,
                group=self.pp_group,
            )
            for stage in self.stages
        ]
        kind = schedule_class(self.pipeline.schedule)
        subject = stages[0] if self.pipeline.schedule in SINGLE else stages
        return kind(subject, self.pipeline.microbatches, loss_fn=_loss_as_it_is, scale_grads=False)

    def _carry(self, stage: int) -> Tensor:
        """Return a meta tensor with the shape and dtype of a stage's output, which is the loss for the last stage.

        For stage -1, return the input of the first stage: the index of a micro-batch, [1] int64.
        """
        if stage < 0:
            return torch.empty(1, dtype=torch.int64, device="meta")
        carry = self.pipeline.stages[stage].output
        if carry is None:
            return torch.empty((), device="meta", requires_grad=True)
        shape = (self._elements[stage], carry.width)
        trained = self.pipeline.needs_gradient(stage, self.plan.param_shards)
        return torch.empty(shape, dtype=self.plan.precision.compute, device="meta", requires_grad=trained)


def _nothing_left() -> Callable[[], None]:
    """Return a function that does nothing, for the weight half of a split backward.

    The input half has computed the gradients of the weights, too.
    """
    return lambda: None


def _loss_as_it_is(loss: Tensor, target: Tensor) -> Tensor:
    return loss
