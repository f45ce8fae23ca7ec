"""Define base classes by which `parallel` recognizes modules, and helpers for modules and tensors.

Modules of this library compute no buffers in their constructors. Modules of users may: tables such as rotary
frequencies, which no weight file contains. So `without_weights` builds a module with parameters on the meta device and
buffers in host memory.
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
from tessera.runtime.torch_internals import local_chunks, tensor_of_chunk, without_advice_on_gathers

# Options for `torch.compile` with Inductor. Mixed-order reduction is off: in torch 2.11 it made gradients of weights
# that are broadcast over many tokens wrong by orders of magnitude.
COMPILE_OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {"triton.mix_order_reduction": False}

# Prefixes of parameter names that wrappers add: recompute, compile and pipeline stages.
_WRAPPERS = re.compile(r"_checkpoint_wrapped_module\.|_orig_mod\.|_stage\d+\.|_stage_model\.")


class AttentionCore(nn.Module):
    """Base class of modules without weights that compute attention: forward(q, k, v, segments).

    `ModelPlan.attention` lists them, and context parallelism wraps them. Ring attention needs a causal or full mask.
    """

    causal: bool | None = None  # True: causal mask, False: no mask, None: another mask
    window: tuple[int, int] | None = None
    scale: float | None = None  # None: 1 / sqrt(head size)
    implementation: str = "auto"
    head_dim: int | None = None  # None: unknown


class RowStatistics(nn.Module):
    """Base class of modules that need sums over all tokens of a row.

    `row_total` adds up the sums of all ranks that share the row.
    """

    row_total: nn.Module


class FeatureStatistics(nn.Module):
    """Base class of modules that need sums over all features of a token.

    If features are sharded over ranks, `feature_total` adds the ranks' sums, and weight vectors are sharded as well.
    """

    feature_total: nn.Module | None


class FusedLayers(nn.Module):
    """Base class of modules that may read the weights of their linear layers to fuse them, without calling the layers.

    `calls_layers`: set to True to call the layers, so that their forward hooks run.
    """

    calls_layers = False


class ExpertBalance(RowStatistics):
    """Base class of modules that compute a load-balancing loss of experts, with the weight `coefficient`."""

    part_total: nn.Module  # sums over the tp ranks that split a sequence: each of them needs the full loss
    coefficient: float


# Name of a stacked expert weight in transformers and PEFT (`target_parameters`) -> names of the weights in this
# library.
EXPERT_WEIGHTS: Mapping[str, tuple[str, ...]] = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}


class StackedExperts(nn.Module):
    """Base class of modules with stacked expert weights [experts, ...]. Each token uses `top_k` experts.

    `dispatch` sends tokens to experts and has no weights; expert parallelism replaces it. `adapted_weights`: name that
    a LoRA adapter has as a child module -> the weights that this adapter changes.
    """

    dispatch: nn.Module
    top_k: int
    adapted_weights: Mapping[str, tuple[str, ...]] = {}


@runtime_checkable
class KeepsFrozenBuffers(Protocol):
    """Declare a module whose frozen weights are buffers, such as quantized weights."""

    frozen_buffers: tuple[str, ...]


def clean_name(name: str) -> str:
    """Return a parameter or module name without the prefixes that wrappers add."""
    return _WRAPPERS.sub("", name)


def local_shard(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor; any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_parts(tensor: Tensor) -> Iterator[tuple[Tensor, tuple[slice, ...]]]:
    """Yield this rank's parts of a tensor, which may be sharded, each with its position in the unsharded tensor.

    A part is rectangular, as torch's distributed checkpoint describes shards.
    """
    for box in local_chunks(tensor):
        inside = tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))
        yield tensor_of_chunk(tensor, box.offsets), inside


def copy_shard(target: Tensor, full: Tensor) -> None:
    """Copy this rank's shard of an unsharded tensor into a tensor, which may be plain or sharded."""
    for part, inside in local_parts(target):
        part.copy_(full[inside])


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor of a DTensor, detached. All ranks of its mesh must call this."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with without_advice_on_gathers():
        full: Tensor = tensor.full_tensor()
    return full.detach()


def without_weights(make: Callable[[], nn.Module]) -> nn.Module:
    """Call `make` and return its module with parameters on the meta device and buffers with data in host memory.

    Each parameter is moved to the meta device when it is registered. Random numbers of buffers have a fixed seed, so
    they are equal on all ranks and after a resume.
    """
    with seeded("buffers"), torch.device("cpu"), _parameters_on_meta():
        return make()


@contextlib.contextmanager
def seeded(*words: object) -> Iterator[None]:
    """Seed torch's host generator as a function of `words` inside the `with` block, and restore it afterwards."""
    with torch.random.fork_rng(devices=[]):
        # `torch.manual_seed` would also seed the accelerators.
        torch.default_generator.manual_seed(derive(*words))
        yield


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    def strip(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter.is_meta:
            return None
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    handle = register_module_parameter_registration_hook(strip)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


def computed_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return all buffers that are not on the meta device, to restore them after `to_empty` or a change of dtype."""
    buffers = module.named_buffers(remove_duplicate=False)
    return {clean_name(name): buffer for name, buffer in buffers if not buffer.is_meta}


def put_back_buffers(module: nn.Module, values: dict[str, Tensor]) -> None:
    """Restore the buffers that `computed_buffers` returned, in their original dtype."""
    for name, buffer in list(module.named_buffers(remove_duplicate=False)):
        if clean_name(name) in values:
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, values[clean_name(name)].to(buffer.device))
