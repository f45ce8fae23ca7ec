"""Which experts a rank holds; and what cannot be dealt so."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from tessera.core.run_config import ParallelSection
from tessera.core.types import ModelPlan
from tessera.parallel.axes import Axes


@dataclass(frozen=True)
class ExpertPlan:
    modules: tuple[str, ...]  # hold stacked experts; each is a shard group of its own
    ep: int


def plan_experts(section: ParallelSection, model_plan: ModelPlan, module: nn.Module, axes: Axes) -> ExpertPlan | None:
    """None: every rank that has a layer has all of its experts."""
    if section.ep == 1:
        return None
    raise NotImplementedError
