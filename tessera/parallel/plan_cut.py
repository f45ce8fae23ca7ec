"""Where a pipeline is cut: which parts of the model make which stage, and which rank has which stages."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from tessera.core.run_config import ParallelSection, Schedule
from tessera.core.types import Carry, ModelPlan
from tessera.parallel.axes import Axes


@dataclass(frozen=True)
class StagePlan:
    modules: tuple[str, ...]  # links of the chain that are in this stage
    cost: float  # share of the whole chain
    hands_on: Carry | None  # to the next stage; None: it is the last


@dataclass(frozen=True)
class PipelinePlan:
    schedule: Schedule
    stages: tuple[StagePlan, ...]
    owner: tuple[int, ...]  # stage -> position on the pp axis
    microbatches: int
    tokens: int  # of a micro-batch
    copies: tuple[str, ...] = ()  # parameters that two stages hold: a table that embeds and a head that reads it

    def stages_of(self, position: int) -> list[int]:
        return [stage for stage, owner in enumerate(self.owner) if owner == position]


def plan_cut(
    section: ParallelSection, model_plan: ModelPlan, module: nn.Module, axes: Axes, microbatches: int, tokens: int
) -> PipelinePlan | None:
    """None: every rank has all layers."""
    if section.pp == 1:
        return None
    raise NotImplementedError
