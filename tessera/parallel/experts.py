"""Experts dealt over ranks: each rank computes its own, tokens travel to them and back."""

from __future__ import annotations

from torch import nn

from tessera.parallel.mesh import Mesh
from tessera.parallel.plan_experts import ExpertPlan


def apply_experts(module: nn.Module, plan: ExpertPlan, mesh: Mesh) -> None:
    """`module` may be a stage: what the plan names and the module lacks is passed over."""
    raise NotImplementedError
