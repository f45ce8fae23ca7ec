"""Made for a run by its recipe: the guard, the check of gradients, the average of weights, answers on the way."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tessera.core.errors import TesseraError
from tessera.core.run_config import RunConfig
from tessera.core.types import Batch, Processor, RowSource
from tessera.parallel.axes import CONTEXT, DATA
from tessera.parallel.mesh import Mesh
from tessera.parallel.pipeline.chain import PipelinedModel
from tessera.parallel.pipeline.stages import Stages
from tessera.parallel.plan import Plan
from tessera.train.answers import Answers
from tessera.train.callbacks import Callback
from tessera.train.coverage import Coverage
from tessera.train.ema import Ema
from tessera.train.guard.blame import Reader
from tessera.train.guard.guard import Guard


def build_guard(config: RunConfig, plan: Plan, mesh: Mesh, source: RowSource) -> Guard:
    needs = 1 if plan.pipeline is None else plan.pipeline.microbatches
    reader = Reader(source, mesh.position(DATA), needs)
    return Guard(config.guard, reader, config.optim.clip_norm, config.optim.schedule.warmup)


def build_ema(config: RunConfig, module: nn.Module) -> Ema | None:
    return None if config.train.ema is None else Ema(config.train.ema, module)


def build_checks(
    config: RunConfig, plan: Plan, mesh: Mesh, module: nn.Module, processor: Processor | None, device: torch.device
) -> list[Callback]:
    found: list[Callback] = []
    if config.guard.coverage != "off":
        found.append(Coverage([piece.name for piece in plan.pieces if piece.trained], config.guard.coverage))
    if config.train.answers_every:
        if plan.axes.size(CONTEXT) > 1:
            raise TesseraError(
                "ranks cannot share the rows of a prompt, which grow by a token at a time",
                where="train.answers_every",
                fix="set train.answers_every=0, or parallel.cp=1",
            )
        found.append(Answers(config, processor, _answering(module, plan, mesh, device)))
    return found


def _answering(module: nn.Module, plan: Plan, mesh: Mesh, device: torch.device) -> Any:
    if isinstance(module, Stages):
        return PipelinedModel(module, plan, mesh, device)
    return _Asked(module, device) if hasattr(module, "new_cache") else module


class _Asked:
    """Weights may wait in host memory; what is computed lies on the device."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module: Any = module
        self._device = device

    def __call__(self, batch: Batch, **options: Any) -> Any:
        return self._module(batch, **options)

    def new_cache(self, rows: int, capacity: int) -> Any:
        return self._module.new_cache(rows, capacity, self._device)
