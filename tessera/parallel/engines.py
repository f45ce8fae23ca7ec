"""Which engine runs a plan, and what it has to know of the ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tessera.parallel.axes import LOSS, PP
from tessera.parallel.engine import Engine, SimpleEngine
from tessera.parallel.mesh import Mesh
from tessera.parallel.pipeline import PipelineEngine, Stages
from tessera.parallel.plan import Plan
from tessera.parallel.shared import SharedGradients
from tessera.parallel.tensor import sequence_gradients


def build_engine(module: nn.Module, plan: Plan, mesh: Mesh, device: torch.device) -> Engine:
    shared: list[SharedGradients] = [] if plan.tensor is None else sequence_gradients(module, plan.tensor, mesh)
    if plan.pipeline is not None:
        assert isinstance(module, Stages)
        return PipelineEngine(module, plan, mesh, device, shared)
    return SimpleEngine(module, plan.accumulate, group=mesh.group(LOSS), shared=shared)


def counted_elsewhere(module: nn.Module, plan: Plan, mesh: Mesh) -> list[Tensor]:
    """Parameters of which another stage holds a copy that counts for the norm."""
    if plan.pipeline is None or not plan.pipeline.copies or mesh.position(PP) == plan.pipeline.owner[0]:
        return []
    return [p for name, p in module.named_parameters() if name.endswith(plan.pipeline.copies)]
