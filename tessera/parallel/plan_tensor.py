"""Which parameter is cut how, over the ranks that compute a layer together; and what cannot be cut so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from tessera.core.run_config import ParallelSection
from tessera.core.types import ModelPlan, TensorStyle
from tessera.parallel.axes import Axes


@dataclass(frozen=True)
class TensorPlan:
    styles: Mapping[str, TensorStyle]  # parameter -> style, of every parameter
    towers: tuple[str, ...]  # modules that are cut over the tower's axis instead
    sequence: bool  # between layers, each rank keeps a part of the tokens


def plan_tensor(
    section: ParallelSection, model_plan: ModelPlan, module: nn.Module, axes: Axes, tokens: int
) -> TensorPlan | None:
    """None: every rank computes whole layers."""
    if section.tp == 1:
        return None
    raise NotImplementedError
