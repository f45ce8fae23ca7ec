"""fully_shard (FSDP2) by the plan: each block one group, the rest with the root."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from tessera.core import device as devices
from tessera.parallel.mesh import REPLICATE, SHARD
from tessera.parallel.plan import Plan, ahead


def fsdp_arguments(module: nn.Module, plan: Plan, mesh: DeviceMesh, device: torch.device) -> dict[str, Any]:
    """The keywords of `fully_shard` for a block of `module`."""
    ignored = {p for path in plan.ignored for p in module.get_submodule(path).parameters()}
    # Pinning needs a driver to pin for.
    pin = plan.pin_memory and devices.supports(device, "pinned_memory")
    return {
        "mesh": mesh[SHARD] if plan.replicate == 1 else mesh[REPLICATE, SHARD],
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=plan.param_dtype,
            reduce_dtype=plan.reduce_dtype,
            cast_forward_inputs=plan.cast_forward_inputs,
        ),
        "offload_policy": CPUOffloadPolicy(pin_memory=pin) if plan.offload else OffloadPolicy(),
        "reshard_after_forward": plan.reshard_after_forward,
        "ignored_params": ignored or None,
    }


def shard_modules(module: nn.Module, paths: Sequence[str], arguments: dict[str, Any], plan: Plan) -> None:
    """Each path becomes a group of its own, inner ones before what they lie in; what is left goes with the root."""
    for path in sorted(paths, key=lambda path: -path.count(".")):
        fully_shard(module.get_submodule(path), **arguments)
    # The type of the output is the root's affair alone: a block's output meets weights of the computed type.
    policy: MixedPrecisionPolicy = arguments["mp_policy"]
    outer = MixedPrecisionPolicy(
        param_dtype=policy.param_dtype,
        reduce_dtype=policy.reduce_dtype,
        output_dtype=plan.output_dtype,
        cast_forward_inputs=policy.cast_forward_inputs,
    )
    # The root stays gathered between forward and backward: the loss multiplies by the head's weight after forward.
    fully_shard(module, **{**arguments, "mp_policy": outer, "reshard_after_forward": False})


def prefetch_modules(module: nn.Module, paths: Sequence[str], forward: int, backward: int) -> None:
    """Each block gathers the next ones in order of execution, while it computes; 0 leaves it to torch."""
    chain: list[FSDPModule] = []
    for path in paths:
        block = module.get_submodule(path)
        assert isinstance(block, FSDPModule), f"{path} is no shard group"
        chain.append(block)
    for number, group in enumerate(chain):
        if forward:
            group.set_modules_to_forward_prefetch(ahead(chain, number, forward, "forward"))
        if backward:
            group.set_modules_to_backward_prefetch(ahead(chain, number, backward, "backward"))


def sum_gradients(module: nn.Module) -> None:
    """Losses are sums; the one division by the global count happens with clipping. FSDP must not divide as well."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)


def apply_fsdp(module: nn.Module, plan: Plan, mesh: DeviceMesh, device: torch.device) -> None:
    shard_modules(module, plan.blocks, fsdp_arguments(module, plan, mesh, device), plan)
    prefetch_modules(module, plan.blocks, plan.prefetch_forward, plan.prefetch_backward)
