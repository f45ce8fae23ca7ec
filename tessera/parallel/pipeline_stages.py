"""Split a model into pipeline stages, run them without a schedule for evaluation and generation, and keep copies of
tied weights equal."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from tessera.core.batch import Batch
from tessera.core.cache import CacheStep
from tessera.core.outputs import Outputs
from tessera.core.spec import EncodesMedia, InitializesByName
from tessera.parallel.mesh import PP, Mesh
from tessera.parallel.pipeline_plan import PipelinePlan
from tessera.parallel.plan import Plan
from tessera.runtime.distributed import wait_for
from tessera.runtime.modules import clean_name, local_shard


class Work(Protocol):
    """Declare the work of a stage's forward pass: a training micro-batch, an evaluation, or one generated token."""

    def __call__(self, stage: StageModule, carry: Tensor | None, mb: int) -> Any: ...


@runtime_checkable
class EncodesInStages(EncodesMedia, Protocol):
    """Declare a model that can encode media even if its encoders are split over pipeline stages."""

    def encode_stage(self, batch: Batch, carry: Tensor | None) -> Tensor:
        """Run this pipeline stage's part of `encode` on `carry`, the result of the previous stage."""
        ...

    def unpacked(self, batch: Batch, packed: Tensor) -> dict[str, Tensor]:
        """Return the embeddings by tensor name. `packed`: result of `encode_stage` on the last stage."""
        ...


class StageModule(nn.Module):
    """Hold one pipeline stage: the model without the modules of other stages.

    `forward` calls `work`, which also computes the loss, because FSDP gathers the stage's weights only for `forward`.
    `clean_name` removes `_stage_model` from parameter names.
    """

    def __init__(self, model: nn.Module, number: int, count: int) -> None:
        super().__init__()
        self._stage_model = model
        self.number = number
        self.is_first = number == 0
        self.is_last = number == count - 1
        self.work: Work | None = None

    def forward(self, carry: Tensor | None, mb: int) -> Any:
        assert self.work is not None, "the engine sets the work of a stage before each call"
        return self.work(self, None if self.is_first else carry, mb)

    def run(self, batch: Any, carry: Tensor | None, **options: Any) -> Any:
        """Call the model of this stage. `work` calls this. `carry`: the output of the stage before."""
        return self._stage_model(batch, carry=carry, **options)


class LocalStages(nn.Module):
    """Hold the stages of this rank as one module with the parameter names of the unsplit model."""

    def __init__(self, stages: Sequence[StageModule]) -> None:
        super().__init__()
        for stage in stages:
            self.add_module(f"_stage{stage.number}", stage)
        # `initialize` depends on parameter names only, so that of the first local stage works for all local stages.
        model = stages[0]._stage_model
        if isinstance(model, InitializesByName):
            self.initialize = model.initialize

    def __iter__(self) -> Iterator[StageModule]:
        return iter(cast(list[StageModule], list(self.children())))

    def here(self) -> dict[int, StageModule]:
        """Return the stages of this rank by stage index."""
        return {stage.number: stage for stage in self}


def split_into_stages(module: nn.Module, plan: Plan, mesh: Mesh) -> LocalStages:
    pipeline = plan.layout.pipeline
    assert pipeline is not None
    units = [path for stage in pipeline.stages for path in stage.modules]
    stages = []
    for number in pipeline.stages_of(mesh.position(PP)):
        model = copy.deepcopy(module)
        keep_only(model, units, set(pipeline.modules_of(number)))
        stages.append(StageModule(model, number, len(pipeline.stages)))
    return LocalStages(stages)


def keep_only(model: nn.Module, units: Collection[str], paths: Collection[str]) -> None:
    """Remove all `units` except those in `paths` from a model, and parent modules that become empty."""
    around = {path[:at] for path in units for at, letter in enumerate(path) if letter == "."}
    bare = [path for path in around if not any(unit.startswith(path + ".") for unit in paths)]
    for path in sorted({*units, *bare} - set(paths), key=len, reverse=True):
        parent, _, name = path.rpartition(".")
        owner = model.get_submodule(parent)
        # A ModuleList stays, and its removed members become None: models iterate over it.
        if not isinstance(getattr(owner, name), (nn.ModuleList, nn.ModuleDict)):
            setattr(owner, name, None)


class SequentialStages:
    """Run the stages one after another, without a schedule.

    The shape is sent before each activation. So batches may have different shapes; in training all have one shape.
    """

    def __init__(self, stages: LocalStages, plan: Plan, mesh: Mesh, device: torch.device) -> None:
        assert plan.layout.pipeline is not None
        self.here = stages.here()
        self.owner = plan.layout.pipeline.owner
        self.dtype = plan.precision.compute
        self.device = device
        self.group = mesh.group(PP)
        self.position = mesh.position(PP)

    def run(self, work: Work) -> Any:
        """Return the result of the last stage on the rank that has it; None on the others."""
        carry: Tensor | None = None
        last = len(self.owner) - 1
        for number, owner in enumerate(self.owner):
            if owner != self.position:
                continue
            if number > 0 and self.owner[number - 1] != owner:
                carry = self._receive(self.owner[number - 1])
            stage = self.here[number]
            stage.work = work
            out = stage(carry, 0)
            if number == last:
                return out
            carry = out.to(self.dtype)
            if self.owner[number + 1] != owner:
                self._send(carry, self.owner[number + 1])
        return None

    def share(self, result: Tensor | None) -> Tensor:
        """Broadcast a result of the last stage to all ranks of the pipeline, in the dtype of activations."""
        source = self.owner[-1]
        shape = torch.zeros(2, dtype=torch.int64, device=self.device)
        if result is not None:
            shape = torch.tensor(result.shape, dtype=torch.int64, device=self.device)
        dist.broadcast(shape, group=self.group, group_src=source)
        values = self._empty(shape) if result is None else result.to(self.dtype).contiguous()
        dist.broadcast(values, group=self.group, group_src=source)
        return values

    def _send(self, carry: Tensor, to: int) -> None:
        shape = torch.tensor(carry.shape, dtype=torch.int64, device=self.device)
        dist.send(shape, group=self.group, group_dst=to)
        if carry.numel():
            dist.send(carry.contiguous(), group=self.group, group_dst=to)

    def _receive(self, source: int) -> Tensor:
        shape = torch.zeros(2, dtype=torch.int64, device=self.device)
        dist.recv(shape, group=self.group, group_src=source)
        carry = self._empty(shape)
        if carry.numel():
            dist.recv(carry, group=self.group, group_src=source)
        return carry

    def _empty(self, shape: Tensor) -> Tensor:
        sizes: Sequence[int] = shape.tolist()
        return torch.empty(*sizes, dtype=self.dtype, device=self.device)


class PipelinedModel:
    """Call the stages of all pipeline ranks like one language model, for generation. All ranks must call it, and get
    the same results."""

    def __init__(self, stages: LocalStages, plan: Plan, mesh: Mesh, device: torch.device) -> None:
        self.stages = SequentialStages(stages, plan, mesh, device)
        self.device = device
        model: Any = next(iter(stages))._stage_model
        self._output = next(iter(model.heads))  # name of the first head, whose output is the logits
        self._media = model if isinstance(model, EncodesInStages) else None
        self.encoders: Sequence[Any] = () if self._media is None else self._media.encoders

    def new_cache(self, blocks: int, block_size: int) -> dict[int, Any]:
        """Return one cache for each stage on this rank."""
        return {
            number: stage._stage_model.new_cache(blocks, block_size)  # type: ignore[operator]
            for number, stage in self.stages.here.items()
        }

    @torch.no_grad()
    def __call__(
        self,
        batch: Batch,
        logits: str = "last",
        cache: dict[int, Any] | None = None,
        step: CacheStep | None = None,
    ) -> Outputs:
        def work(stage: StageModule, carry: Tensor | None, mb: int) -> Any:
            memory = None if cache is None else cache[stage.number]
            out = stage.run(batch, carry, logits=logits, cache=memory, step=step)
            return out[self._output] if stage.is_last else out

        return {self._output: self.stages.share(self.stages.run(work))}

    @torch.no_grad()
    def encode(self, batch: Batch) -> dict[str, Tensor]:
        """Run the encoders on their pipeline stages. Return the embeddings for the batch's slots on all ranks."""
        assert self._media is not None

        def work(stage: StageModule, carry: Tensor | None, mb: int) -> Any:
            return cast(EncodesInStages, stage._stage_model).encode_stage(batch, carry)

        return self._media.unpacked(batch, self.stages.share(self.stages.run(work)))


class TiedCopies:
    """Keep a tied weight and its copy on another stage equal: both get the sum of their gradients."""

    def __init__(self, stages: LocalStages, pipeline: PipelinePlan, mesh: Mesh) -> None:
        self.group = mesh.group(PP)
        self.pairs: list[tuple[Tensor, Tensor]] = []  # original and copy, both on this rank
        # (original or copy on this rank, pipeline position of the rank that has the other one)
        self.apart: list[tuple[Tensor, int]] = []
        here, last = stages.here(), len(pipeline.stages) - 1
        for name in pipeline.copies:
            home = pipeline.home(name)
            parameters = {stage: _parameters(here[stage])[name] for stage in (home, last) if stage in here}
            if len(parameters) == 2:
                self.pairs.append((parameters[home], parameters[last]))
            elif parameters:
                ((stage, parameter),) = parameters.items()
                self.apart.append((parameter, pipeline.owner[last if stage == home else home]))

    def sum_gradients(self) -> None:
        for first, second in self.pairs:
            if first.requires_grad:
                _gradient(first).add_(_gradient(second))
                _gradient(second).copy_(_gradient(first))
        for parameter, peer in self.apart:
            if parameter.requires_grad:
                self._exchange(_gradient(parameter), peer)

    def _exchange(self, mine: Tensor, peer: int) -> None:
        """Exchange gradients with a peer and add them: both ranks get the same sum."""
        theirs = torch.empty_like(mine)
        operations = [
            dist.P2POp(dist.isend, mine.clone(), group=self.group, group_peer=peer),
            dist.P2POp(dist.irecv, theirs, group=self.group, group_peer=peer),
        ]
        wait_for(dist.batch_isend_irecv(operations))
        mine.add_(theirs)

    @torch.no_grad()
    def settle(self, optimizer: Optimizer) -> None:
        """Copy weights and optimizer state to copies on the same rank: a checkpoint loads only the original."""
        for first, second in self.pairs:
            local_shard(second).copy_(local_shard(first))
            for key, value in optimizer.state.get(first, {}).items():
                if isinstance(value, Tensor) and key in optimizer.state.get(second, {}):
                    local_shard(optimizer.state[second][key]).copy_(local_shard(value))


def _parameters(stage: torch.nn.Module) -> dict[str, Tensor]:
    return {clean_name(name): parameter for name, parameter in stage.named_parameters()}


def _gradient(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return local_shard(parameter.grad)
