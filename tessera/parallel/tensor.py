"""Layers computed by several ranks together: DTensor styles by the plan."""

from __future__ import annotations

from torch import nn

from tessera.parallel.mesh import Mesh
from tessera.parallel.plan_tensor import TensorPlan
from tessera.parallel.shared import SharedGradients


def apply_tensor(module: nn.Module, plan: TensorPlan, mesh: Mesh) -> None:
    """`module` may be a stage: what the plan names and the module lacks is passed over."""
    raise NotImplementedError


def sequence_gradients(module: nn.Module, plan: TensorPlan, mesh: Mesh) -> list[SharedGradients]:
    """Gradients that each rank computed from its part of the tokens alone."""
    raise NotImplementedError
