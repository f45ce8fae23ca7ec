"""Layers one after another on several ranks: the stages of a model, and the engine that runs torch's schedules."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tessera.core.types import Batch, LossOut, Task
from tessera.parallel.mesh import Mesh
from tessera.parallel.plan import Plan
from tessera.parallel.shared import SharedGradients


class Stage(nn.Module):
    """One stage: a model without the parts that lie elsewhere. `core.names.clean` takes `_stage_model` out of names."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._stage_model = model

    def forward(self, carry: Tensor, mb: Tensor) -> Tensor:
        raise NotImplementedError


class Stages(nn.Module):
    """The stages of this rank, as one module with the names of the whole model."""

    def __init__(self, stages: Sequence[tuple[int, Stage]]) -> None:
        super().__init__()
        for number, stage in stages:
            self.add_module(f"_stage{number}", stage)


def cut_stages(module: nn.Module, plan: Plan, mesh: Mesh) -> Stages:
    raise NotImplementedError


class PipelineEngine:
    def __init__(
        self, stages: Stages, plan: Plan, mesh: Mesh, device: torch.device, shared: Sequence[SharedGradients] = ()
    ) -> None:
        raise NotImplementedError

    def step(self, task: Task, microbatches: Sequence[Batch]) -> LossOut:
        raise NotImplementedError

    def evaluate(self, task: Task, batch: Batch, counts: bool) -> LossOut:
        raise NotImplementedError
