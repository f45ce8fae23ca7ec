"""Apply FSDP2 by the plan: each block is a group, and so is each module with another dtype or mesh.

All other parameters belong to the group of the root.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard

from tessera.config.pattern import home
from tessera.core.spec import EncodesMedia
from tessera.parallel.collectives import GradientSync
from tessera.parallel.memory_estimate import shard_dimension
from tessera.parallel.mesh import FSDP, FSDP_EXPERTS, REPLICATE, Mesh
from tessera.parallel.modules import present
from tessera.parallel.plan import Layout, Plan, ahead
from tessera.runtime import device as devices
from tessera.runtime.modules import clean_name, local_shard


def fsdp_arguments(module: nn.Module, plan: Plan, mesh: Mesh, device: torch.device) -> dict[str, Any]:
    """Return the keywords of `fully_shard` for a block of `module`."""
    sharding, paths = plan.layout.sharding, present(module, plan.layout.modules.ignored)
    ignored = {p for path in paths for p in module.get_submodule(path).parameters()}
    ignored |= set(whole_parameters(module, plan).values())  # `whole_gradients` sums their gradients
    # Pinned memory is useful only for copies to an accelerator.
    pin = sharding.pin_memory and devices.supports(device, "pinned_memory")
    return {
        "mesh": mesh.copies(FSDP),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=plan.precision.compute,
            reduce_dtype=plan.precision.reduce,
            cast_forward_inputs=plan.precision.cast_inputs,
        ),
        "offload_policy": CPUOffloadPolicy(pin_memory=pin) if sharding.offload else OffloadPolicy(),
        "reshard_after_forward": sharding.reshard_after_forward,
        "ignored_params": ignored or None,
    }


def shard_modules(
    module: nn.Module,
    paths: Sequence[str],
    arguments: dict[str, Any],
    plan: Plan,
    *,
    root: nn.Module | None = None,
    meshes: Mapping[str, DeviceMesh] | None = None,
) -> None:
    """Make each module in `paths` an FSDP group, inner modules first; the root's group has all other parameters.

    `root`: the module that wraps `module`, if any. `meshes`: mesh by module path, where it differs from `arguments`.
    These modules, and those with another dtype, are groups too.
    """
    meshes = meshes or {}
    arguments = {**arguments, **_placement(arguments["mesh"], plan)}
    wide = present(module, [path for path in plan.precision.float32 if path not in plan.float32_whole])
    other_types = [*present(module, list(plan.precision.modules)), *wide]
    for path in sorted({*paths, *meshes, *other_types}, key=lambda path: -path.count(".")):
        other = home(path, meshes)
        group = arguments if other is None else {**arguments, "mesh": meshes[other], **_placement(meshes[other], plan)}
        if path in plan.precision.modules:
            # The module computes in another dtype: cast its inputs to it, and its outputs back.
            types = (plan.precision.modules[path], plan.precision.reduce, plan.precision.compute)
            group = {**group, "mp_policy": MixedPrecisionPolicy(*types, cast_forward_inputs=True)}
        elif path in wide:  # a float32 module casts its inputs itself
            policy = MixedPrecisionPolicy(torch.float32, plan.precision.reduce, cast_forward_inputs=False)
            group = {**group, "mp_policy": policy}
        fully_shard(module.get_submodule(path), **group)
    # Only the root casts its output: outputs of blocks and of pipeline stages stay in the dtype of computation. The
    # engine casts the output of the last stage.
    output = plan.precision.output if plan.layout.pipeline is None else None
    outer = replace(arguments["mp_policy"], output_dtype=output)
    # The root is not resharded after forward: the loss then reads the head's weight.
    fully_shard(module if root is None else root, **{**arguments, "mp_policy": outer, "reshard_after_forward": False})


def _placement(mesh: DeviceMesh, plan: Plan) -> dict[str, Any]:
    """Return the keyword that sets each parameter's sharded dimension; {} if all are sharded in the first dimension."""
    if all(shard.dim == 0 for shard in plan.param_shards):
        return {}
    shared_by = mesh.size(mesh.ndim - 1)  # a 2-d mesh replicates over its first dimension and shards over the last one

    def placement(parameter: nn.Parameter) -> Shard:
        split = [p.dim for p in parameter.placements if isinstance(p, Shard)] if isinstance(parameter, DTensor) else []
        return Shard(shard_dimension(local_shard(parameter).shape, shared_by, split))

    return {"shard_placement_fn": placement}


def prefetch_modules(module: nn.Module, paths: Sequence[str], forward: int, backward: int) -> None:
    """Set how many blocks each block prefetches in forward and backward; 0 keeps FSDP's default."""
    chain: list[FSDPModule] = []
    for path in paths:
        block = module.get_submodule(path)
        assert isinstance(block, FSDPModule), f"{path} is not an FSDP group"
        chain.append(block)
    for number, group in enumerate(chain):
        if forward:
            group.set_modules_to_forward_prefetch(ahead(chain, number, forward, "forward"))
        if backward:
            group.set_modules_to_backward_prefetch(ahead(chain, number, backward, "backward"))


def sum_gradients(module: nn.Module) -> None:
    """Let FSDP sum gradients instead of averaging: the loss is divided by global counts before backward."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)


def whole_parameters(module: nn.Module, plan: Plan) -> dict[str, nn.Parameter]:
    """Return the parameters outside of FSDP that are not ignored: scalars, and those of float32 modules in blocks."""
    wide = plan.float32_whole
    named = ((clean_name(name), p) for name, p in module.named_parameters())
    return {name: p for name, p in named if p.dim() == 0 or home(name, wide) is not None}


def whole_gradients(module: nn.Module, plan: Plan, mesh: Mesh) -> list[GradientSync]:
    """Return the gradient reductions of unsharded trained parameters, which run at the end of a step."""
    if not plan.layout.sharding.active:
        return []
    views = {shard.name: shard.view for shard in plan.param_shards}
    by_view: dict[str, list[Tensor]] = {}
    for name, parameter in whole_parameters(module, plan).items():
        if parameter.requires_grad:
            by_view.setdefault(views[name], []).append(parameter)
    groups = [(mesh.group(axis), some) for view, some in by_view.items() for axis in (view, REPLICATE)]
    return [GradientSync(group, some) for group, some in groups if group is not None]


def apply_fsdp(module: nn.Module, plan: Plan, mesh: Mesh, device: torch.device, root: nn.Module) -> None:
    blocks = present(module, plan.layout.modules.blocks)
    arguments = fsdp_arguments(module, plan, mesh, device)
    shard_modules(module, blocks, arguments, plan, root=root, meshes=_other_meshes(module, plan.layout, mesh))
    prefetch_modules(module, blocks, plan.layout.sharding.prefetch_forward, plan.layout.sharding.prefetch_backward)
    if root is module and isinstance(module, EncodesMedia):
        # Make FSDP gather the root's weights before `encode` too, not only before `forward`.
        register_fsdp_forward_method(module, "encode")


def _other_meshes(module: nn.Module, layout: Layout, mesh: Mesh) -> dict[str, DeviceMesh]:
    """Return the meshes of modules that are sharded over other ranks: experts, and encoders with their own layout."""
    meshes: dict[str, DeviceMesh] = {}
    for path in present(module, layout.axes.encoders):
        if layout.axes.fsdp_view(path) != FSDP:
            meshes[path] = mesh.copies(layout.axes.fsdp_view(path))
    if layout.experts is not None:
        meshes.update(dict.fromkeys(present(module, layout.experts.modules), mesh.copies(FSDP_EXPERTS)))
    return meshes
