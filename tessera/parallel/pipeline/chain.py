"""One pass forward through all stages, one stage after another: evaluation and generation, where nothing overlaps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tessera.core.types import Batch
from tessera.parallel.axes import PP
from tessera.parallel.mesh import Mesh
from tessera.parallel.pipeline.stages import Stage, Stages, Work
from tessera.parallel.plan import Plan


class Chain:
    """What a stage hands on travels with its shape: unlike in training, micro-batches need not be alike."""

    def __init__(self, stages: Stages, plan: Plan, mesh: Mesh, device: torch.device) -> None:
        assert plan.pipeline is not None
        self.here = stages.here()
        self.owner = plan.pipeline.owner
        self.dtype = plan.param_dtype
        self.device = device
        self.group = mesh.group(PP)
        self.position = mesh.position(PP)

    def run(self, work: Work) -> Any:
        """What the last stage's work gives, on the rank that has it; None on the others."""
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

    def share(self, found: Tensor | None) -> Tensor:
        """What the last stage's rank found, on all ranks of the pipeline. It comes in the type of carries."""
        source = self.owner[-1]
        shape = torch.zeros(2, dtype=torch.int64, device=self.device)
        if found is not None:
            shape = torch.tensor(found.shape, dtype=torch.int64, device=self.device)
        dist.broadcast(shape, group=self.group, group_src=source)
        values = self._room(shape) if found is None else found.to(self.dtype).contiguous()
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
        carry = self._room(shape)
        if carry.numel():
            dist.recv(carry, group=self.group, group_src=source)
        return carry

    def _room(self, shape: Tensor) -> Tensor:
        sizes: Sequence[int] = shape.tolist()
        return torch.empty(*sizes, dtype=self.dtype, device=self.device)


class Logits(NamedTuple):
    logits: Tensor


class PipelinedModel:
    """A language model whose stages lie on several ranks, as `infer.generate` calls one. All ranks of the pipeline
    call it together and get the same logits."""

    def __init__(self, stages: Stages, plan: Plan, mesh: Mesh, device: torch.device) -> None:
        self.chain = Chain(stages, plan, mesh, device)
        self.device = device

    def new_cache(self, rows: int, capacity: int) -> dict[int, Any]:
        """One for each stage: a cache counts the tokens that went through all layers it serves."""
        return {
            number: stage._stage_model.new_cache(rows, capacity, self.device)  # type: ignore[operator]
            for number, stage in self.chain.here.items()
        }

    @torch.no_grad()
    def __call__(self, batch: Batch, logits: str = "last", cache: dict[int, Any] | None = None) -> Logits:
        def work(stage: Stage, carry: Tensor | None, mb: int) -> Any:
            out = stage.run(batch, carry, logits=logits, cache=None if cache is None else cache[stage.number])
            return out.logits if stage.is_last else out

        return Logits(self.chain.share(self.chain.run(work)))
