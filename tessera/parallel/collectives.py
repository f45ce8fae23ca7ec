"""Collectives that gradients pass through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Exchange = Callable[[Tensor], Tensor]


def with_backward(x: Tensor, forward: Exchange, backward: Exchange) -> Tensor:
    """`forward` of x; its gradient comes back by `backward`."""
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
    """Runs of rows to every rank of a group, and theirs from them. Runs may be empty."""
    there = partial(_all_to_all, to_each=to_each, from_each=from_each, group=group)
    back = partial(_all_to_all, to_each=from_each, from_each=to_each, group=group)
    return with_backward(x, there, back)


def _all_to_all(x: Tensor, to_each: Sequence[int], from_each: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty((sum(from_each), *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), list(from_each), list(to_each), group=group)
    return out


def gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


def scattered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's part of the rows of the sum."""
    out = x.new_empty((x.shape[0] // group.size(), *x.shape[1:]))
    dist.reduce_scatter_tensor(out, x.contiguous(), group=group)
    return out


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def as_it_is(x: Tensor) -> Tensor:
    """A view: what a function gives back must not be what it was given."""
    return x.view_as(x)
