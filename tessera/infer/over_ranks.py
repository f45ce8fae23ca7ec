"""A model that answers from several ranks, laid out as a recipe's `parallel` section says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tessera.core.config import build
from tessera.core.errors import TesseraError
from tessera.core.run_config import ParallelSection
from tessera.core.types import ModelPlan
from tessera.parallel.apply import parallelize
from tessera.parallel.axes import CONTEXT
from tessera.parallel.mesh import build_mesh
from tessera.parallel.pipeline.chain import PipelinedModel
from tessera.parallel.pipeline.stages import Stages
from tessera.parallel.plan import Workload, make_plan

TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def over_ranks(
    module: nn.Module, model_plan: ModelPlan, parallel: Mapping[str, Any], device: torch.device, dtype: torch.dtype
) -> tuple[nn.Module, Callable[..., Any]]:
    """This rank's part, allocated and not yet filled, and what is called in its place."""
    if not dist.is_initialized():
        raise TesseraError(
            "a layout over several ranks needs a process group",
            where="parallel",
            fix="start with torchrun, and call torch.distributed.init_process_group() first",
        )
    if dtype not in TYPES:
        raise TesseraError(f"{dtype} over several ranks", where="dtype", allowed=TYPES.values())
    section = build(ParallelSection, dict(parallel), "parallel")
    # As many rows as any schedule asks for: nothing is scheduled here.
    work = Workload(rows=dist.get_world_size() * (section.virtual or 2))
    plan = make_plan(section, model_plan, module, dist.get_world_size(), storage_dtype=TYPES[dtype], workload=work)
    if plan.axes.size(CONTEXT) > 1:
        raise TesseraError(
            "ranks cannot share the rows of a prompt, which grow by a token at a time", where="parallel.cp", allowed=[1]
        )
    mesh = build_mesh(plan.axes, device)
    part = parallelize(module, plan, mesh, device).eval()
    if isinstance(part, Stages):
        return part, PipelinedModel(part, plan, mesh, device)
    return part, part
