"""Adafactor: store mean squares of rows and columns of a matrix instead of every element.

The update of a matrix is its gradient divided by the root mean square (RMS) that its row and column averages estimate.
The RMS of the update is clipped to one. Then the update is multiplied by the RMS of the weights: `lr` scales with it.
Sums over a sharded row or column are reduced over the ranks that share it. The formulas are those of
`torch.optim.Adafactor`, which does not update sharded tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.optim import Optimizer

from tessera.runtime.modules import local_shard

_DECAY = -0.8  # exponent: the squared gradient of a step has the weight step ** -0.8 in its average
_SMALLEST = 1e-3  # lower bound of the RMS of weights, to which the learning rate is relative


class Adafactor(Optimizer):
    """Update weights by Adafactor. Its state is fp32: row and column averages of matrices, all elements of vectors."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {"lr": 1e-2, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None, "gradients are there already"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, float(group["lr"]), group["weight_decay"])

    def _update(self, parameter: Tensor, rate: float, decay: float) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            if parameter.dim() > 1:
                state["row_var"] = _statistic(parameter, -1)
                state["col_var"] = _statistic(parameter, -2)
            else:
                state["variance"] = torch.zeros_like(parameter, dtype=torch.float32)
        state["step"] += 1
        step = float(state["step"])  # `step` is a CPU tensor, so reading it does not synchronize the device
        newest, rate_now = step**_DECAY, min(rate, 1 / math.sqrt(step))
        weight = local_shard(parameter)
        assert parameter.grad is not None
        grad = local_shard(parameter.grad).float()
        smallest = torch.finfo(parameter.dtype).eps
        square = grad.square()
        if parameter.dim() > 1:
            rows, columns = local_shard(state["row_var"]), local_shard(state["col_var"])
            last, before = parameter.dim() - 1, parameter.dim() - 2
            row_sums = _summed(square.sum(-1, keepdim=True), parameter, lambda dim: dim == last)
            rows.lerp_(row_sums / parameter.shape[-1], newest)
            column_sums = _summed(square.sum(-2, keepdim=True), parameter, lambda dim: dim == before)
            columns.lerp_(column_sums / parameter.shape[-2], newest)
            mean = _summed(rows.sum(-2, keepdim=True), parameter, lambda dim: dim == before) / parameter.shape[-2]
            variance = (rows * columns).div_(mean.clamp_(min=smallest))
        else:
            variance = local_shard(state["variance"]).lerp_(square, newest).clone()
        update = variance.clamp_(min=smallest**2).rsqrt_().mul_(grad)
        norms = torch.stack([weight.float().square().sum(), update.square().sum()])
        sizes = (_summed(norms, parameter, lambda dim: True) / max(1, parameter.numel())).sqrt()
        length = rate_now * sizes[0].clamp(min=_SMALLEST) / sizes[1].clamp(min=1.0)
        if decay:
            weight.mul_(1 - rate * decay)
        weight.sub_((update * length).to(weight.dtype))


def _statistic(parameter: Tensor, dim: int) -> Tensor:
    """Return zeros of a parameter's shape with size 1 in `dim`, sharded like the parameter in other dimensions."""
    shape = list(parameter.shape)
    shape[dim] = 1
    if not isinstance(parameter, DTensor):
        return torch.zeros(shape, dtype=torch.float32, device=parameter.device)
    local = parameter.to_local()
    sizes = list(local.shape)
    sizes[dim] = 1
    gone = dim % parameter.dim()
    places: list[Placement] = [
        Replicate() if placement.is_replicate() or cast(Shard, placement).dim == gone else placement
        for placement in parameter.placements
    ]
    strides = [math.prod(shape[at + 1 :]) for at in range(len(shape))]
    return DTensor.from_local(
        torch.zeros(sizes, dtype=torch.float32, device=local.device),
        parameter.device_mesh,
        places,
        run_check=False,
        shape=torch.Size(shape),
        stride=tuple(strides),
    )


def _summed(values: Tensor, parameter: Tensor, over: Callable[[int], bool]) -> Tensor:
    """Sum `values` in place over the ranks that have other shards of a dimension of `parameter`, and return them.

    `over`: returns for the index of a dimension whether its shards are summed.
    """
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for axis, placement in enumerate(parameter.placements):
            if not placement.is_replicate() and over(cast(Shard, placement).dim) and mesh.size(axis) > 1:
                dist.all_reduce(values, group=mesh.get_group(axis))
    return values


def adafactor_bytes(shape: Sequence[int]) -> int:
    """Return the bytes of Adafactor's state for a rank's shard of a parameter. `shape`: shape of the shard."""
    numbers = math.prod(shape)
    if len(shape) < 2 or not numbers:
        return 4 * numbers + 4
    return 4 * (numbers // shape[-1] + numbers // shape[-2]) + 4
