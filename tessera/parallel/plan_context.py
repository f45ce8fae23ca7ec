"""Which tokens of a row, and which pictures of a batch, a rank works on; and what cannot be shared so."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from tessera.core.run_config import ParallelSection
from tessera.core.types import ModelPlan
from tessera.parallel.axes import Axes


@dataclass(frozen=True)
class ContextPlan:
    attention: tuple[str, ...]  # modules whose attention spans the ranks of a row
    ring: int
    ulysses: int
    tokens: int  # of a whole micro-batch


def plan_context(
    section: ParallelSection, model_plan: ModelPlan, module: nn.Module, axes: Axes, tokens: int
) -> ContextPlan | None:
    """None: every rank has whole rows and all pictures."""
    if section.cp == 1 and axes.size("deal") == 1:
        return None
    raise NotImplementedError
