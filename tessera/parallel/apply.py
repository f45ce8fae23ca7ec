"""The one place where a model meets its plan, in a fixed order:

freeze -> recompute -> fully_shard -> materialize -> initialize. Loading weights comes after, in `checkpoint`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from tessera.core.names import clean
from tessera.core.rng import generator
from tessera.parallel.fsdp import apply_fsdp
from tessera.parallel.plan import Plan
from tessera.parallel.recompute import apply_recompute


def parallelize(module: nn.Module, plan: Plan, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    """Takes a module on the meta device; gives this rank's part of it, allocated on `device` and not yet filled."""
    frozen = set(plan.frozen)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in frozen)
    module.to(plan.storage_dtype)
    apply_recompute(module, plan.recompute)
    if plan.sharded:
        apply_fsdp(module, plan, mesh)
    return module.to_empty(device=device)


def initialize(module: nn.Module, seed: int) -> None:
    """Fills every parameter as a function of (seed, its name) alone, so any layout starts from the same numbers.

    Each full tensor exists once, on the device, while its own shard is taken from it; nothing is communicated.
    """
    start: Callable[[str, torch.Tensor, torch.Generator], None] = module.initialize  # type: ignore[assignment]
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            name = clean(name)
            full = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
            start(name, full, generator(parameter.device, seed, "init", name))
            full = full.to(parameter.dtype)
            if isinstance(parameter, DTensor):
                part = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
                parameter.to_local().copy_(part.to_local())
            else:
                parameter.copy_(full)
