"""Whether a step's numbers are bad, and an update that does not happen when they are.

The verdict is made on the device and the host reads it one step at a time. Where the optimizer's own kernel can be told
not to act (the flag that loss scalers use), the update is queued before the host looks: the device never waits for the
host, and the host waits no longer than until backward is done, while the update still runs. Elsewhere the host looks
first. On a CPU there is nothing to wait for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from tessera.core import device as devices

Kind = Literal["not finite", "loss spike", "gradient spike"]


@dataclass(frozen=True)
class Verdict:
    """Of one step, alike on every rank."""

    bad: bool
    loss: float
    grad_norm: float

    def kind(self, loss_limit: float, norm_limit: float) -> Kind:
        if not (math.isfinite(self.loss) and math.isfinite(self.grad_norm)):
            return "not finite"
        return "loss spike" if self.loss > loss_limit else "gradient spike"


def update_unless_bad(
    optimizer: Optimizer, loss: Tensor, grad_norm: Tensor, loss_limit: float, norm_limit: float
) -> Verdict:
    """Steps the optimizer if loss and norm are finite and within their limits on every rank."""
    flag = judge(loss, grad_norm, loss_limit, norm_limit)
    look = devices.look_at(torch.stack([flag, *(value.to(flag) for value in (loss, grad_norm))]))
    if acts_on_flag(optimizer, flag.device):
        step_unless(optimizer, flag)
        bad, *values = look()
    else:
        bad, *values = look()
        if not bad:
            optimizer.step()
    return Verdict(bool(bad), *values)


@torch.no_grad()
def judge(loss: Tensor, grad_norm: Tensor, loss_limit: float, norm_limit: float) -> Tensor:
    """1 or 0, on the device: whatever one rank finds bad is bad for all."""
    # Not "above the limit" but "not within it": nan is neither.
    flag = (~((loss <= loss_limit) & (grad_norm <= norm_limit) & loss.isfinite() & grad_norm.isfinite())).double()
    flag = flag.to(devices.sum_dtype(flag.device))
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return flag


def acts_on_flag(optimizer: Optimizer, device: torch.device) -> bool:
    """Whether its kernels read a flag, and lie where the flag does: one on the host would be read too early."""
    if device.type == "cpu" or not all(group.get("fused") for group in optimizer.param_groups):
        return False
    return all(p.device == device for group in optimizer.param_groups for p in group["params"])


def step_unless(optimizer: Optimizer, flag: Tensor) -> None:
    """Queues an update that leaves weights, moments and step counts alone if the flag is 1 by the time it runs."""
    told: Any = optimizer
    told.found_inf = flag.float()
    try:
        optimizer.step()
    finally:
        del told.found_inf
