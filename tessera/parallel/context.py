"""Rows shared by several ranks: attention that reaches over all of a row, and towers that deal pictures."""

from __future__ import annotations

from torch import nn

from tessera.core.types import Batch
from tessera.parallel.mesh import Mesh
from tessera.parallel.plan_context import ContextPlan


def apply_context(module: nn.Module, plan: ContextPlan, mesh: Mesh) -> None:
    """`module` may be a stage: what the plan names and the module lacks is passed over."""
    raise NotImplementedError


def own_part(batch: Batch, plan: ContextPlan, position: int, deal: int) -> Batch:
    """On the host: what a rank at `position` of the row's ranks, and `deal` of those that deal pictures, works on."""
    raise NotImplementedError
