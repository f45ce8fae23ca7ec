"""Named axes over the ranks. The names are words of the plan; no other room spells them."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tessera.parallel.plan import Plan

REPLICATE, SHARD = "dp_replicate", "dp_shard"


def build_mesh(plan: Plan, device: torch.device) -> DeviceMesh:
    return init_device_mesh(device.type, (plan.replicate, plan.shard), mesh_dim_names=(REPLICATE, SHARD))
