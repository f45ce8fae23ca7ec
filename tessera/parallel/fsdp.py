"""fully_shard (FSDP2) by the plan: each block one group, the rest with the root."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from tessera.parallel.mesh import REPLICATE, SHARD
from tessera.parallel.plan import Plan


def apply_fsdp(module: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(
        param_dtype=plan.param_dtype, reduce_dtype=plan.reduce_dtype, cast_forward_inputs=False
    )
    axes = mesh[SHARD] if plan.replicate == 1 else mesh[REPLICATE, SHARD]
    for path in plan.blocks:
        fully_shard(
            module.get_submodule(path),
            mesh=axes,
            mp_policy=policy,
            reshard_after_forward=plan.reshard_after_forward,
        )
    # The root stays gathered between forward and backward: the loss multiplies by the head's weight after forward.
    fully_shard(module, mesh=axes, mp_policy=policy, reshard_after_forward=False)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            # Losses are sums; the one division by the global count happens with clipping. FSDP must not divide as well.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
