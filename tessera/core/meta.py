"""Building other people's modules without their weights: parameters without data, buffers with it.

A family of ours has no buffer that must be filled. Anyone else's module may keep tables in buffers (rotary
frequencies, masks) that nothing but its own constructor can compute, and that no weight file holds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from tessera.core.names import clean
from tessera.core.rng import derive


def without_weights(make: Callable[[], nn.Module]) -> nn.Module:
    """The module that `make` constructs, with parameters on the meta device and buffers as it computed them.

    A parameter loses its data the moment it is registered, so at most one exists at a time. What the constructor draws
    at random for a buffer is the same in every process and every time: ranks must agree, and so must a resumed run.
    """
    with seeded("buffers"), torch.device("cpu"), _parameters_on_meta():
        return make()


@contextlib.contextmanager
def seeded(*words: object) -> Iterator[None]:
    """Torch's own stream for the host as a function of `words` inside, and untouched outside."""
    with torch.random.fork_rng(devices=[]):
        # Not `torch.manual_seed`, which would also reseed the accelerators.
        torch.default_generator.manual_seed(derive(*words))
        yield


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    def strip(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter.is_meta:
            return None
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    handle = register_module_parameter_registration_hook(strip)  # type: ignore[arg-type]  # its result replaces
    try:
        yield
    finally:
        handle.remove()


def computed_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Buffers that have data, by their clean names: what `to_empty` and a change of type would destroy."""
    found = module.named_buffers(remove_duplicate=False)
    return {clean(name): buffer for name, buffer in found if not buffer.is_meta}


def put_back_buffers(module: nn.Module, values: dict[str, Tensor]) -> None:
    """In their own type, whatever type the weights have: a table of frequencies is not a weight."""
    for name, buffer in list(module.named_buffers(remove_duplicate=False)):
        if clean(name) in values:
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, values[clean(name)].to(buffer.device))
