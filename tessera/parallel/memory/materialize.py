"""From shapes to memory: every parameter of this rank allocated where the plan wants it, weights shared as before."""

from __future__ import annotations

import torch
from torch import nn

from tessera.parallel.plan import Plan
from tessera.parallel.wrapping import present

Place = tuple[nn.Module, str]  # where a parameter hangs


def materialize(module: nn.Module, plan: Plan, device: torch.device) -> nn.Module:
    allocate(module, torch.device("cpu") if plan.offload else device)
    if plan.offload:
        _move_what_computes(module, plan, device)
    return module


def allocate(module: nn.Module, device: torch.device) -> nn.Module:
    ties = _ties(module)
    module.to_empty(device=device)
    if ties:
        _tie_again(module, ties)
    return module


def _move_what_computes(module: nn.Module, plan: Plan, device: torch.device) -> None:
    """Offloading brings sharded parameters to the device by itself; buffers, whole modules and single numbers have to
    be there."""
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            part._buffers[name] = buffer.to(device)
    for path in present(module, plan.ignored):
        module.get_submodule(path).to(device)
    for parameter in module.parameters():
        if parameter.dim() == 0:
            parameter.data = parameter.data.to(device)


def _ties(module: nn.Module) -> list[list[Place]]:
    places: dict[nn.Parameter, list[Place]] = {}
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            places.setdefault(parameter, []).append((part, name))
    return [shared for shared in places.values() if len(shared) > 1]


def _tie_again(module: nn.Module, ties: list[list[Place]]) -> None:
    """Leaving the meta device replaces parameters one by one, and two names for one weight become two weights."""
    for (owner, name), *others in ties:
        weight = getattr(owner, name)
        for other, other_name in others:
            setattr(other, other_name, weight)
    module._apply(lambda tensor: tensor)  # fully_shard looks up here which parameters it has now
