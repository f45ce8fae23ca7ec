"""Base classes of modules that parallelism treats in a way of its own, and helpers for modules and tensors.

Modules of this library have no buffer that must be filled. A foreign module may keep tables in buffers (rotary
frequencies, masks) that only its own constructor can compute and that no weight file holds. So `without_weights` builds
it with parameters on the meta device and with its buffers computed.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from tessera.runtime.rng import derive
from tessera.runtime.torch_internals import without_advice_on_gathers

# Options for every `torch.compile` with Inductor. Mixed-order reduction is off: on torch 2.11 it made the gradients of
# weights that are broadcast over many tokens wrong by orders of magnitude.
COMPILE_OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {"triton.mix_order_reduction": False}

# Prefixes that recompute, compile and the stages of a pipeline add.
_WRAPPERS = re.compile(r"_checkpoint_wrapped_module\.|_orig_mod\.|_stage\d+\.|_stage_model\.")


class AttentionCore(nn.Module):
    """Base of modules without weights that compute attention, forward(q, k, v, segments): `ModelPlan.attention` names
    them, and context parallelism wraps them. A ring of ranks serves those that are causal or full."""

    causal: bool | None = None  # None: the module has a mask of its own
    window: tuple[int, int] | None = None
    scale: float | None = None  # None: one over the square root of the head size
    implementation: str = "auto"
    head_dim: int | None = None  # None: unknown, then the communication of this attention is not estimated


class RowStatistics(nn.Module):
    """Base of modules that need sums over whole rows. `row_total` adds them up over the ranks that share a row."""

    row_total: nn.Module


class FeatureStatistics(nn.Module):
    """Base of modules that need sums over all features of a token. Where ranks have a part of the features each,
    `feature_total` adds up over these ranks, and vectors of the module's weights are split like the features."""

    feature_total: nn.Module | None


class ExpertBalance(RowStatistics):
    """Base of modules that compute the statistics of a loss of weight `coefficient`, which balances experts."""

    part_total: nn.Module  # adds up over the ranks of a row that compute one loss together
    coefficient: float


# Adapters of stacked experts, by the names that transformers and PEFT (`target_parameters`) have for the weights -> the
# weights here that each is for.
EXPERT_WEIGHTS: Mapping[str, tuple[str, ...]] = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}


class StackedExperts(nn.Module):
    """Base of modules that hold the weights of experts, [experts, ...] each; a token is computed by `top_k` of them.
    `dispatch` has no weights and brings tokens to experts: expert parallelism replaces it. `adapted_weights`: the
    adapters that it can have, children of these names, and the weights that each is for."""

    dispatch: nn.Module
    top_k: int
    adapted_weights: Mapping[str, tuple[str, ...]] = {}


@runtime_checkable
class KeepsFrozenBuffers(Protocol):
    """Mark a module whose frozen weights are buffers, such as those in fewer bits."""

    frozen_buffers: tuple[str, ...]


def clean_name(name: str) -> str:
    """Return a parameter or module name as the model's author wrote it, without the prefixes that wrappers add."""
    return _WRAPPERS.sub("", name)


def local_shard(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor: the local part of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return all of a tensor, without its graph. All ranks that hold a part of it call this together."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with without_advice_on_gathers():
        full: Tensor = tensor.full_tensor()
    return full.detach()


def without_weights(make: Callable[[], nn.Module]) -> nn.Module:
    """Return the module that `make` constructs, with parameters on the meta device and buffers as it computed them.

    A parameter loses its data the moment it is registered, so at most one exists at a time. What the constructor draws
    at random for a buffer is the same in every process and every time: ranks must agree, and so must a resumed run.
    """
    with seeded("buffers"), torch.device("cpu"), _parameters_on_meta():
        return make()


@contextlib.contextmanager
def seeded(*words: object) -> Iterator[None]:
    """Seed torch's host generator as a function of `words` inside the block, and restore it afterwards."""
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
    """Return the buffers that have data, by clean names: `to_empty` and a change of type would destroy them."""
    buffers = module.named_buffers(remove_duplicate=False)
    return {clean_name(name): buffer for name, buffer in buffers if not buffer.is_meta}


def put_back_buffers(module: nn.Module, values: dict[str, Tensor]) -> None:
    """Put computed buffers back in their own type, whatever type the weights have."""
    for name, buffer in list(module.named_buffers(remove_duplicate=False)):
        if clean_name(name) in values:
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, values[clean_name(name)].to(buffer.device))
