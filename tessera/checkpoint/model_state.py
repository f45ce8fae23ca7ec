"""The tensors of a model and its optimizer under names that no wrapper, layout or device changes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from tessera.core.errors import TesseraError
from tessera.core.names import clean


def model_tensors(parts: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers themselves. One shared by two modules appears once, by its first name; of two
    copies that a pipeline made of one, the first (the engine makes the other follow)."""
    reshard(parts)
    found: dict[str, Tensor] = {}
    for name, parameter in parts.named_parameters():
        found.setdefault(clean(name), parameter)
    persistent = {clean(name) for name in parts.state_dict(keep_vars=True)}
    for name, buffer in parts.named_buffers():
        if clean(name) in persistent:
            found[clean(name)] = buffer
    return found


def reshard(parts: nn.Module) -> None:
    """A pass without a backward one (evaluation) leaves gathered weights in place of the sharded parameters; the
    optimizer and the checkpoint know only the latter."""
    for part in parts.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def tied_names(parts: nn.Module) -> dict[str, str]:
    """Further names of shared parameters -> the name `model_tensors` knows them by."""
    first: dict[Tensor, str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in parts.named_parameters(remove_duplicate=False):
        known = first.setdefault(tensor, clean(name))
        if known != clean(name):
            aliases[clean(name)] = known
    return aliases


def training_tensors(parts: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """All tensors of a run as a checkpoint names them: `model.<name>` and `optim.<name>.<key>`."""
    tensors = model_tensors(parts)
    names = {tensor: name for name, tensor in tensors.items()}
    return {
        **{f"model.{name}": tensor for name, tensor in tensors.items()},
        **optimizer_tensors(optimizer, names),
    }


def optimizer_tensors(optimizer: Optimizer, names: Mapping[Tensor, str]) -> dict[str, Tensor]:
    """The optimizer's tensors, created now where it has not stepped yet, so that loading can be in place."""
    _create_state(optimizer)
    found: dict[str, Tensor] = {}
    for parameter in _trained(optimizer):
        if parameter not in names:
            continue  # a copy of one that has a name
        for key, value in optimizer.state[parameter].items():
            if value is None:
                continue
            if not isinstance(value, Tensor):
                raise TesseraError(
                    f"{type(optimizer).__name__} keeps {key!r} of {names[parameter]} as a {type(value).__name__}",
                    fix="a checkpoint holds tensors: use an optimizer that keeps its state in them",
                )
            found[f"optim.{names[parameter]}.{key}"] = value
    return found


def _trained(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


@torch.no_grad()
def _create_state(optimizer: Optimizer) -> None:
    """Lets the optimizer make its own state by a step that changes nothing: zero gradients, no learning rate.

    One parameter at a time, each put back afterwards: even adding zero can turn -0.0 into 0.0, and a copy of all
    of them at once might not fit.
    """
    fresh = [p for p in _trained(optimizer) if not optimizer.state.get(p)]
    if not fresh:
        return
    everything = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in everything]
    rates = [group["lr"] for group in optimizer.param_groups]
    try:
        for parameter in everything:
            parameter.grad = None
        for group in optimizer.param_groups:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        for parameter in fresh:
            before = parameter.detach().clone()
            parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            parameter.grad = None
            parameter.detach().copy_(before)
            step = optimizer.state[parameter].get("step")
            if isinstance(step, Tensor):
                step.zero_()
    finally:
        for parameter, gradient in zip(everything, gradients, strict=True):
            parameter.grad = gradient
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
