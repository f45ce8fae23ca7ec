"""Collect the content of a checkpoint: tensors of model and optimizer by name, and all other state as JSON.

Tensor names do not depend on wrappers, layout or device. Values of `state.json` must survive a reload, so it contains
only plain JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from tessera.errors import TesseraError
from tessera.runtime.modules import clean_name

MODEL = "model."  # prefix of the model's tensors in a checkpoint; the optimizer's have "optim."


def model_tensors(parts: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name.

    A tensor that two modules share appears once, under its first name. Of a tied weight that is copied to two pipeline
    stages, only the first appears (the engine keeps both equal).
    """
    reshard(parts)
    tensors: dict[str, Tensor] = {}
    for name, parameter in parts.named_parameters():
        tensors.setdefault(clean_name(name), parameter)
    persistent = {clean_name(name) for name in parts.state_dict(keep_vars=True)}
    for name, buffer in parts.named_buffers():
        if clean_name(name) in persistent:
            tensors[clean_name(name)] = buffer
    return tensors


def reshard(parts: nn.Module) -> None:
    """Replace gathered FSDP weights by the sharded parameters.

    A forward pass without backward (evaluation) leaves weights gathered. The optimizer and checkpoints need the shards.
    """
    for part in parts.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def tied_names(parts: nn.Module) -> dict[str, str]:
    """Return a mapping from second names of shared parameters to their names in `model_tensors`."""
    first: dict[Tensor, str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in parts.named_parameters(remove_duplicate=False):
        first_name = first.setdefault(tensor, clean_name(name))
        if first_name != clean_name(name):
            aliases[clean_name(name)] = first_name
    return aliases


def training_tensors(parts: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return all tensors of a run by their names in a checkpoint: `model.<name>` and `optim.<name>.<key>`."""
    tensors = model_tensors(parts)
    names = {tensor: name for name, tensor in tensors.items()}
    return {
        **{f"{MODEL}{name}": tensor for name, tensor in tensors.items()},
        **optimizer_tensors(optimizer, names),
    }


def optimizer_tensors(optimizer: Optimizer, names: Mapping[Tensor, str]) -> dict[str, Tensor]:
    """Return the optimizer's tensors. Before the first step they are created, so that a checkpoint can fill them."""
    _create_state(optimizer)
    tensors: dict[str, Tensor] = {}
    for parameter in _trained(optimizer):
        if parameter not in names:
            continue  # the second copy of a shared parameter
        for key, value in optimizer.state[parameter].items():
            if value is None:
                continue
            if not isinstance(value, Tensor):
                raise TesseraError(
                    f"{type(optimizer).__name__} stores {key!r} of {names[parameter]} as a {type(value).__name__}",
                    fix="use an optimizer that stores its state in tensors: a checkpoint contains tensors only",
                    code="checkpoint.optimizer-state-not-tensor",
                )
            tensors[f"optim.{names[parameter]}.{key}"] = value
    return tensors


def _trained(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


@torch.no_grad()
def _create_state(optimizer: Optimizer) -> None:
    """Let the optimizer create its state by a step with zero gradients and a learning rate of 0.

    The step can change a parameter from -0.0 to 0.0, so parameters are copied before and restored after it, one at a
    time, because copies of all of them might not fit into memory.
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


def state_to_json(state: Mapping[str, Any]) -> bytes:
    _check(state, "state")
    return json.dumps(state, indent=1).encode()


def parse_state(data: bytes, where: str) -> dict[str, Any]:
    try:
        state = json.loads(data)
        if not isinstance(state, dict):
            raise ValueError(f"it is a {type(state).__name__}, not a mapping")
        return state
    except (ValueError, RecursionError) as error:
        raise TesseraError(f"the state is damaged: {error}", where=where, code="checkpoint.damaged-state") from error


def _check(value: Any, where: str) -> None:
    """Raise unless a value can be stored as JSON. Tuples (loaded as lists), nan and infinity are allowed."""
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        for key, inner in value.items():
            _check(inner, f"{where}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            _check(inner, f"{where}.{index}")
    elif not (value is None or isinstance(value, (str, int, float))):
        raise TesseraError(
            f"the state contains a {type(value).__name__} that is not JSON, or has keys that are not strings",
            where=where,
            fix="convert the value to plain JSON, or save it as a tensor",
            code="checkpoint.state-not-json",
        )
