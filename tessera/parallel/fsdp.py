"""fully_shard (FSDP2) by the plan: each block one group, the rest with the root."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from tessera.core import device as devices
from tessera.core.names import clean
from tessera.core.pattern import home
from tessera.core.tensors import local_part
from tessera.parallel.axes import COPY, COPY_EXPERTS, COPY_TOWER, REPLICATE, TP_REST
from tessera.parallel.mesh import Mesh
from tessera.parallel.plan import Plan, ahead
from tessera.parallel.planning.holdings import shard_dimension
from tessera.parallel.shared import SharedGradients
from tessera.parallel.wrapping import present


def fsdp_arguments(module: nn.Module, plan: Plan, mesh: Mesh, device: torch.device) -> dict[str, Any]:
    """The keywords of `fully_shard` for a block of `module`."""
    ignored = {p for path in present(module, plan.ignored) for p in module.get_submodule(path).parameters()}
    ignored |= {p for p in module.parameters() if p.dim() == 0}  # cannot be cut: see `scalar_gradients`
    # Pinning needs a driver to pin for.
    pin = plan.pin_memory and devices.supports(device, "pinned_memory")
    return {
        "mesh": mesh.copies(COPY),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=plan.param_dtype,
            reduce_dtype=plan.reduce_dtype,
            cast_forward_inputs=plan.cast_forward_inputs,
        ),
        "offload_policy": CPUOffloadPolicy(pin_memory=pin) if plan.offload else OffloadPolicy(),
        "reshard_after_forward": plan.reshard_after_forward,
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
    """Each path becomes a group of its own, inner ones before what they lie in; what is left goes with the root.

    `root` may be a module around `module`. `meshes` names modules whose copies are shared by other ranks than the rest.
    """
    meshes = meshes or {}
    arguments = {**arguments, **_placement(arguments["mesh"], plan)}
    for path in sorted({*paths, *meshes}, key=lambda path: -path.count(".")):
        other = home(path, meshes)
        own = arguments if other is None else {**arguments, "mesh": meshes[other], **_placement(meshes[other], plan)}
        fully_shard(module.get_submodule(path), **own)
    # The type of the output is the root's affair alone: a block's output meets weights of the computed type. So does
    # what a stage of a pipeline hands on; its last one sees to the type itself.
    policy: MixedPrecisionPolicy = arguments["mp_policy"]
    outer = MixedPrecisionPolicy(
        param_dtype=policy.param_dtype,
        reduce_dtype=policy.reduce_dtype,
        output_dtype=plan.output_dtype if plan.pipeline is None else None,
        cast_forward_inputs=policy.cast_forward_inputs,
    )
    # The root stays gathered between forward and backward: the loss multiplies by the head's weight after forward.
    fully_shard(module if root is None else root, **{**arguments, "mp_policy": outer, "reshard_after_forward": False})


def _placement(mesh: DeviceMesh, plan: Plan) -> dict[str, Any]:
    """Which dimension of a parameter the ranks of a mesh share, if that is for the plan to say."""
    if all(piece.dim == 0 for piece in plan.pieces):
        return {}
    shared_by = mesh.size(mesh.ndim - 1)  # before it, there may be an axis of copies

    def place(parameter: nn.Parameter) -> Shard:
        cut = [p.dim for p in parameter.placements if isinstance(p, Shard)] if isinstance(parameter, DTensor) else []
        return Shard(shard_dimension(local_part(parameter).shape, shared_by, cut))

    return {"shard_placement_fn": place}


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


def scalar_gradients(module: nn.Module, plan: Plan, mesh: Mesh) -> list[SharedGradients]:
    """Single numbers (a temperature, a gate) are whole on every rank, and fully_shard leaves them alone. So their
    gradients are summed when a step ends, over the ranks that it would have summed them over."""
    if not plan.sharded:
        return []
    views = {piece.name: piece.view for piece in plan.pieces}
    found: dict[str, list[Tensor]] = {}
    for name, parameter in module.named_parameters():
        if parameter.dim() == 0 and parameter.requires_grad:
            found.setdefault(views[clean(name)], []).append(parameter)
    groups = [(mesh.group(axis), some) for view, some in found.items() for axis in (view, REPLICATE)]
    return [SharedGradients(group, some) for group, some in groups if group is not None]


def apply_fsdp(module: nn.Module, plan: Plan, mesh: Mesh, device: torch.device, root: nn.Module) -> None:
    blocks = present(module, plan.blocks)
    arguments = fsdp_arguments(module, plan, mesh, device)
    shard_modules(module, blocks, arguments, plan, root=root, meshes=_other_meshes(module, plan, mesh))
    prefetch_modules(module, blocks, plan.prefetch_forward, plan.prefetch_backward)


def _other_meshes(module: nn.Module, plan: Plan, mesh: Mesh) -> dict[str, DeviceMesh]:
    """Experts are trained by the tokens of all ranks that send them some; a tower by those of all that deal."""
    found: dict[str, DeviceMesh] = {}
    if TP_REST in plan.axes.root and plan.tensor is not None:
        found.update(dict.fromkeys(present(module, plan.tensor.towers), mesh.copies(COPY_TOWER)))
    if plan.experts is not None:
        found.update(dict.fromkeys(present(module, plan.experts.modules), mesh.copies(COPY_EXPERTS)))
    return found
