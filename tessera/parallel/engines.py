"""Which engine runs a plan, and what it has to know of the ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tessera.core.names import clean
from tessera.parallel.axes import LOSS
from tessera.parallel.engine import Engine, SimpleEngine
from tessera.parallel.experts.apply import even_loads
from tessera.parallel.fsdp import scalar_gradients
from tessera.parallel.mesh import Mesh
from tessera.parallel.pipeline.engine import PipelineEngine, Stages
from tessera.parallel.plan import Plan
from tessera.parallel.shared import EndOfStep
from tessera.parallel.tensor import partial_gradients


def build_engine(
    module: nn.Module,
    plan: Plan,
    mesh: Mesh,
    device: torch.device,
    pipeline: type[PipelineEngine] = PipelineEngine,
) -> Engine:
    shared: list[EndOfStep] = [*scalar_gradients(module, plan, mesh)]
    if plan.tensor is not None:
        shared += partial_gradients(module, plan.tensor, mesh)
    if plan.experts is not None:
        shared += even_loads(module, plan.experts, mesh)
    if plan.pipeline is not None:
        assert isinstance(module, Stages)
        return pipeline(module, plan, mesh, device, shared)
    losses = mesh.view(LOSS).get_group()  # of one rank where all ranks compute one loss together
    return SimpleEngine(module, plan.accumulate, group=losses, shared=shared)


def counted_elsewhere(module: nn.Module, plan: Plan, mesh: Mesh) -> list[Tensor]:
    """Parameters of which another stage holds a copy that counts for the norm: those of the last stage do not."""
    if plan.pipeline is None:
        return []
    assert isinstance(module, Stages)
    stage = module.here().get(len(plan.pipeline.stages) - 1)
    if stage is None:
        return []
    return [p for name, p in stage.named_parameters() if clean(name) in plan.pipeline.copies]
