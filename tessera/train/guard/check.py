"""Judge a step's numbers, and apply its update whole, clipped further, or not at all.

The verdict is made on the device, alike on every rank, and the host reads it one step at a time. Where the optimizer's
own kernel can be told not to act (the flag that loss scalers use), the update is queued before the host looks: the
device never waits for the host, and the host waits no longer than until backward is done, while the update still runs.
Elsewhere the host looks first. On a CPU there is nothing to wait for. The update of a spike is clipped by the factor
that the optimizer multiplies gradients with anyway: one number more, and no pass over the gradients.
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
from tessera.optim.adamw import AdamW

Kind = Literal["not finite", "loss spike", "gradient spike"]


@dataclass(frozen=True)
class Limits:
    """What is judged by, alike on every rank."""

    loss: float = math.inf  # more is a spike
    grad_norm: float = math.inf
    clip_norm: float = math.inf  # what every gradient is clipped to
    clip_to: float = math.inf  # what the gradient of a spike is clipped to
    hold: bool = False  # a spike's update is not applied at all


@dataclass(frozen=True)
class Verdict:
    """Of one step, alike on every rank but for the loss and the norm that are not finite."""

    kind: Kind | None  # None: nothing is wrong
    applied: bool
    loss: float
    grad_norm: float


def update_within(optimizer: Optimizer, loss: Tensor, grad_norm: Tensor, limits: Limits) -> Verdict:
    """Step the optimizer: not if a number is not finite on any rank; a spike as the limits tell."""
    judged = judge(loss, grad_norm, limits)
    not_finite, spike = judged[0], judged[1]
    look = devices.look_at(torch.cat([judged, torch.stack([loss.to(judged), grad_norm.to(judged)])]))
    held = torch.maximum(not_finite, spike) if limits.hold else not_finite
    if not limits.hold:
        _clip_further(optimizer, spike, grad_norm.to(judged), limits)
    if acts_on_flag(optimizer, held.device):
        step_unless(optimizer, held)
        numbers = look()
    else:
        numbers = look()
        if not (numbers[0] or (limits.hold and numbers[1])):
            optimizer.step()
    return _verdict(numbers, limits)


def _verdict(numbers: list[float], limits: Limits) -> Verdict:
    not_finite, spike, loss, grad_norm, own_loss, own_norm = numbers
    if not_finite:
        return Verdict("not finite", False, own_loss, own_norm)
    if not spike:
        return Verdict(None, True, loss, grad_norm)
    return Verdict("loss spike" if loss > limits.loss else "gradient spike", not limits.hold, loss, grad_norm)


@torch.no_grad()
def judge(loss: Tensor, grad_norm: Tensor, limits: Limits) -> Tensor:
    """Return, on the device: 1 if a number is not finite, 1 if it is a spike, the loss and the norm; each the largest
    of all ranks, so that all decide alike, now and by what they remember."""
    wide = devices.sum_dtype(loss.device)
    values = torch.stack([loss.detach().to(wide), grad_norm.detach().to(device=loss.device, dtype=wide)])
    spike = (values[0] > limits.loss) | (values[1] > limits.grad_norm)
    told = torch.cat([torch.stack([~values.isfinite().all(), spike]).to(wide), values.nan_to_num(0.0, 0.0, 0.0)])
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return told


@torch.no_grad()
def _clip_further(optimizer: Optimizer, spike: Tensor, grad_norm: Tensor, limits: Limits) -> None:
    """Lower the factor of the gradients of a spike, so that their norm is at most `clip_to`; of no other step."""
    if not math.isfinite(limits.clip_to) or not isinstance(optimizer, AdamW):
        return
    # The factor that is there clips to `clip_norm` already.
    further = (limits.clip_to / (grad_norm.clamp(max=limits.clip_norm) + 1e-6)).clamp(max=1.0)
    further = torch.where(spike > 0, further, torch.ones_like(further))
    scale = optimizer.scale
    optimizer.scale = further if scale is None else scale * further.to(scale)


def acts_on_flag(optimizer: Optimizer, device: torch.device) -> bool:
    """Whether its kernels read a flag, and lie where the flag does: one on the host would be read too early."""
    if device.type == "cpu" or not all(group.get("fused") for group in optimizer.param_groups):
        return False
    return all(p.device == device for group in optimizer.param_groups for p in group["params"])


def step_unless(optimizer: Optimizer, flag: Tensor) -> None:
    """Queue an update that leaves weights, moments and step counts alone if the flag is 1 by the time it runs."""
    told: Any = optimizer
    told.found_inf = flag.float()
    try:
        optimizer.step()
    finally:
        del told.found_inf
