"""The one place where a model meets its plan, in a fixed order:

freeze -> types -> swap -> recompute -> fully_shard -> materialize -> initialize.

Loading weights comes after, in `checkpoint`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from tessera.core.errors import TesseraError
from tessera.core.meta import computed_buffers, put_back_buffers, seeded
from tessera.core.names import clean
from tessera.core.rng import generator
from tessera.parallel.fsdp import apply_fsdp, fsdp_arguments, sum_gradients
from tessera.parallel.materialize import materialize
from tessera.parallel.mixin import Fsdp2Settings, ShardsItself
from tessera.parallel.plan import Plan
from tessera.parallel.recompute import apply_recompute
from tessera.parallel.swap import apply_swap


def parallelize(module: nn.Module, plan: Plan, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    """Takes a module on the meta device; gives this rank's part of it: allocated, not yet filled."""
    buffers = computed_buffers(module)
    frozen = set(plan.frozen)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in frozen)
    _set_types(module, plan)
    apply_swap(module, plan.swap, device)
    if plan.sharded and isinstance(module, ShardsItself):
        _let_it_shard_itself(module, plan, mesh, device)
    else:
        apply_recompute(module, plan.recompute, plan.use_reentrant)
        if plan.sharded:
            apply_fsdp(module, plan, mesh, device)
    sum_gradients(module)
    materialize(module, plan, device)
    put_back_buffers(module, buffers)
    return module


def _set_types(module: nn.Module, plan: Plan) -> None:
    """Of parameters alone: a table that a module keeps in a buffer has the type its author chose."""
    whole = {p for path in plan.ignored for p in module.get_submodule(path).parameters()}
    for parameter in module.parameters():
        if parameter.is_floating_point():
            # Nobody casts an ignored module for computing, and being frozen it needs no master weights.
            parameter.data = parameter.data.to(plan.param_dtype if parameter in whole else plan.storage_dtype)


def _let_it_shard_itself(module: ShardsItself, plan: Plan, mesh: DeviceMesh, device: torch.device) -> None:
    assert isinstance(module, nn.Module)
    arguments, settings = fsdp_arguments(module, plan, mesh, device), Fsdp2Settings.of(plan)
    module._pre_fully_shard(arguments, settings)
    module._fully_shard(arguments, settings)
    module._post_fully_shard()
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and not isinstance(parameter, DTensor):
            raise TesseraError(
                f"{type(module).__name__}._fully_shard left {clean(name)} out: every rank would train its own",
                fix="end it with self.set_fullyshard_modules_to_wrap(), or with fully_shard(self, **fsdp2_kwargs)",
            )


def initialize(
    module: nn.Module, seed: int, device: torch.device, fresh: Callable[[], nn.Module] | None = None
) -> None:
    """Fills every parameter as a function of the seed alone, so any layout starts from the same numbers.

    A module with `initialize(name, tensor, generator)` is filled by name: each full tensor exists once, on the device,
    while its own shard is taken from it. Drawn there also where weights are kept on the host: another device's
    generator gives other numbers. Any other module has only its constructor to ask: `fresh` makes the whole module in
    the memory of each rank's host, and each rank keeps its shards. Nothing is communicated either way.
    """
    start: Callable[[str, torch.Tensor, torch.Generator], None] | None = getattr(module, "initialize", None)
    if start is None:
        assert fresh is not None, "a module without `initialize` needs its constructor"
        _take_from(module, fresh, seed)
        return
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            name = clean(name)
            full = torch.empty(parameter.shape, dtype=torch.float32, device=device)
            start(name, full, generator(device, seed, "init", name))
            _keep_shard(parameter, full)


def _take_from(module: nn.Module, fresh: Callable[[], nn.Module], seed: int) -> None:
    with seeded(seed, "init"), torch.device("cpu"):
        whole = dict(fresh().named_parameters())
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            _keep_shard(parameter, whole[clean(name)].detach())


def _keep_shard(parameter: torch.Tensor, full: torch.Tensor) -> None:
    full = full.to(device=parameter.device, dtype=parameter.dtype)
    if isinstance(parameter, DTensor):
        part = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.to_local().copy_(part.to_local())
    else:
        parameter.copy_(full)
