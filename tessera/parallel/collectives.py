"""Define collectives, a wrapper that gives them gradients, and gradient reductions at the end of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tessera.runtime.modules import local_shard

Exchange = Callable[[Tensor], Tensor]


def with_backward(x: Tensor, forward: Exchange, backward: Exchange) -> Tensor:
    """Return `forward(x)`. In backward, `backward` maps the gradient of the result to the gradient of `x`."""
    out: Tensor = _Exchanged.apply(x, forward, backward)
    return out


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Exchange, backward: Exchange) -> Tensor:
        ctx.exchange_back = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.exchange_back(grads[0]), None, None


def all_to_all(x: Tensor, to_each: Sequence[int], from_each: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Send a slice of `x` to every rank of a group and receive one from each. Slices may be empty."""
    there = partial(_all_to_all, to_each=to_each, from_each=from_each, group=group)
    back = partial(_all_to_all, to_each=from_each, from_each=to_each, group=group)
    return with_backward(x, there, back)


def _all_to_all(x: Tensor, to_each: Sequence[int], from_each: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty((sum(from_each), *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), list(from_each), list(to_each), group=group)
    return out


def gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the `x` of all ranks of a group, concatenated along the first dimension (all-gather)."""
    out = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


def scattered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum `x` over the ranks of a group and return this rank's shard of the first dimension (reduce-scatter)."""
    out = x.new_empty((x.shape[0] // group.size(), *x.shape[1:]))
    dist.reduce_scatter_tensor(out, x.contiguous(), group=group)
    return out


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of `x` over the ranks of a group (all-reduce), without changing `x`."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def as_it_is(x: Tensor) -> Tensor:
    """Return a view: an autograd function must not return its own input."""
    return x.view_as(x)


class PostBackward(Protocol):
    """Declare an operation that all ranks run after the backward passes of a step."""

    def run(self) -> None: ...


@dataclass(frozen=True)
class GradientSync:
    """Sum gradients over a group whose ranks have the same parameters, or the same shards of them."""

    group: dist.ProcessGroup
    parameters: Sequence[Tensor]

    def run(self) -> None:
        """Sum all gradients of a dtype in one all-reduce, since each is small."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)  # other ranks may have a gradient, so this rank adds zeros
            by_dtype.setdefault(parameter.grad.dtype, []).append(local_shard(parameter.grad))
        for grads in by_dtype.values():
            flat = torch.cat([grad.reshape(-1) for grad in grads])
            dist.all_reduce(flat, group=self.group)
            for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(total.view_as(grad))
