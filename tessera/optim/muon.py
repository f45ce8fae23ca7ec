"""Muon for matrices, AdamW for everything else.

The update of a matrix is its momentum with all singular values brought near 1, by five steps of a Newton-Schulz
iteration, times 0.2 sqrt(longer side): then it is as large as an update of AdamW, and both use the same learning rate.
The iteration needs full matrices: a sharded matrix is all-gathered, each rank computes the iteration and updates its
own shard. Stacked experts are separate matrices: ranks with full matrices of some experts gather nothing. Momentum is
computed element by element on shards, so checkpoints can be resharded.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tessera.lora.select import is_factor
from tessera.optim.adamw import AdamW
from tessera.runtime import device as devices
from tessera.runtime.modules import StackedExperts, clean_name, local_parts, local_shard

HEADS = ("head", "lm_head", "score")  # names of output layers, which Muon does not update
# coefficients and steps of the Newton-Schulz iteration, as published by Muon's authors
_COEFFICIENTS, _STEPS = (3.4445, -4.7750, 2.0315), 5
_EPS = 1e-7


def matrices_of(module: nn.Module) -> set[str]:
    """Return the parameters that Muon updates: weights of linear layers except heads, of experts and of adapters."""
    names: set[str] = set()
    for path, part in module.named_modules():
        for kind, parameter in part.named_parameters(recurse=False):
            name = clean_name(f"{path}.{kind}")
            linear = isinstance(part, nn.Linear) and kind == "weight" and path.rpartition(".")[2] not in HEADS
            experts = isinstance(part, StackedExperts) and parameter.dim() == 3
            adapter = is_factor(name) and parameter.dim() >= 2  # adapters of experts are stacked matrices
            if experts or adapter or (linear and parameter.dim() == 2):
                names.add(name)
    return names


class Muon(AdamW):
    """Update groups with `muon: True` by Muon, and other groups by AdamW."""

    def __init__(
        self, groups: list[dict[str, Any]], betas: tuple[float, float], eps: float, *, momentum: float, **how: Any
    ) -> None:
        super().__init__(groups, betas, eps, **how)
        self.momentum = momentum
        for group in self.param_groups:
            if group.get("muon"):
                group["fused"] = False  # Muon's update cannot be skipped by a flag on the device

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None, "gradients are there already"
        scale, groups = self.clip_factor, self.param_groups
        for group in groups:
            if group.get("muon"):
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update(parameter, scale, group["lr"], group["weight_decay"])
        self.param_groups = [group for group in groups if not group.get("muon")]
        try:
            super().step()
        finally:
            self.param_groups = groups

    def _update(self, parameter: Tensor, scale: Tensor | None, rate: float, decay: float) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer: Tensor = state["momentum_buffer"]
        mean = local_shard(buffer)
        assert parameter.grad is not None
        grad = local_shard(parameter.grad).to(mean.dtype)
        if scale is not None:
            grad = grad * scale.to(grad.device, grad.dtype)
        mean.lerp_(grad, 1 - self.momentum)
        ahead = grad.lerp(mean, self.momentum)  # Nesterov momentum
        local_shard(parameter).mul_(1 - rate * decay)
        rate *= 0.2 * math.sqrt(max(parameter.shape[-2:]))
        if _has_whole_matrices(parameter):
            local_shard(parameter).add_(orthogonalize(ahead), alpha=-rate)
            return
        assert isinstance(parameter, DTensor)
        assert isinstance(buffer, DTensor)
        whole = DTensor.from_local(
            ahead,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        ).full_tensor()
        update = orthogonalize(whole)
        for part, inside in local_parts(parameter):
            part.add_(update[inside], alpha=-rate)


def _has_whole_matrices(parameter: Tensor) -> bool:
    """Return whether the local shard contains only full matrices: the last two dimensions are not sharded."""
    if not isinstance(parameter, DTensor):
        return True
    stacked = range(parameter.dim() - 2)
    return all(
        placement.is_replicate() or any(placement.is_shard(dim) for dim in stacked)
        for placement in parameter.placements
    )


def orthogonalize(matrix: Tensor) -> Tensor:
    """Orthogonalize a matrix, or each of stacked matrices: singular values become about 1. The dtype does not change.

    It is computed in bf16 on devices that multiply bf16 much faster, otherwise in fp32.
    """
    fast = devices.supports(matrix.device, "tensor_cores")
    x = matrix.to(torch.bfloat16 if fast else torch.float32)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    a, b, c = _COEFFICIENTS
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    result: Tensor = (x.mT if tall else x).to(matrix.dtype)
    return result
