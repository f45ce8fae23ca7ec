"""Experts: rows put in order of their expert, and one matrix product per expert over its rows.

Nothing here asks the device how many rows an expert got, unless the implementation has to: counts stay where they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.ops.glu import swiglu
from tessera.ops.registry import AUTO, Implementation, Operation

_ALIGNMENT = 16  # bytes: what the grouped kernels ask of the length of a row


@dataclass(frozen=True)
class ExpertOrder:
    """Choices of tokens (token t's k choices are t * k ...) in order of the chosen expert."""

    order: Tensor  # [N] int64: which choice comes at each place
    inverse: Tensor  # [N] int64: at which place each choice comes
    ends: Tensor  # [E] int32: where the choices of each expert end

    @staticmethod
    def of(ids: Tensor, experts: int) -> ExpertOrder:
        """`ids` of any shape. Choices of one expert keep their order, so that sums come out the same every time."""
        ordered, order = ids.flatten().sort(stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
        every = torch.arange(experts, device=order.device, dtype=ordered.dtype)
        return ExpertOrder(order, inverse, torch.searchsorted(ordered, every, right=True, out_int32=True))


def spread_rows(x: Tensor, at: ExpertOrder, choices: int) -> Tensor:
    """`x` [T, D] -> [T * choices, D] in order of experts: a token appears once for each expert it chose."""
    rows: Tensor = _TakeRows.apply(x, at.order, at.inverse, choices)  # type: ignore[no-untyped-call]
    return rows


def collect_rows(y: Tensor, at: ExpertOrder) -> Tensor:
    """Back from the order of experts to the order of choices."""
    rows: Tensor = _TakeRows.apply(y, at.inverse, at.order, 1)  # type: ignore[no-untyped-call]
    return rows


def weigh_choices(y: Tensor, weights: Tensor) -> Tensor:
    """`y` [T * k, D] in order of choices, `weights` [T, k] -> their weighted sums [T, D]."""
    sums = torch.bmm(weights.unsqueeze(1).to(y.dtype), y.view(*weights.shape, y.shape[1]))
    return sums.sum(1)  # of one; a view, which `squeeze` would give, is not what a wrapper of experts may return


class _TakeRows(torch.autograd.Function):
    """Row `order[i] // copies` of x for every i. Its backward pass gathers as well, where torch's own would add by
    atomics: as fast, and the same sum every time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return x.index_select(0, order if copies == 1 else order // copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        grad = grads[0].index_select(0, inverse)
        if ctx.copies > 1:
            grad = grad.view(grad.shape[0] // ctx.copies, ctx.copies, grad.shape[1]).sum(1)
        return grad, None, None, None


def expert_mlp(
    x: Tensor, ends: Tensor, gate: Tensor, up: Tensor, down: Tensor, *, implementation: str = AUTO
) -> Tensor:
    """Each expert's gated MLP over its own rows: `x` [N, D] in order of experts, which end at `ends` [E];
    `gate`, `up` [E, I, D], `down` [E, D, I]."""
    middle = swiglu(
        grouped_linear(x, gate, ends, implementation=implementation),
        grouped_linear(x, up, ends, implementation=implementation),
    )
    return grouped_linear(middle, down, ends, implementation=implementation)


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor, *, implementation: str = AUTO) -> Tensor:
    """Rows of group e, which end at `ends[e]`, times `weight[e]` transposed: [N, K] by [E, O, K] gives [N, O].

    Every row belongs to a group. A group without rows gets the gradient zero.
    """
    run = GROUPED_LINEAR.choose(implementation, _variant(weight), x.device, x.dtype)
    if x.shape[0] == 0:
        return F.linear(x, weight[0])  # no kernel takes nothing; the gradient of all weights is zero this way, not None
    out: Tensor = run(x, weight, ends)
    return out


def _variant(weight: Tensor) -> str:
    fits = all(size * weight.element_size() % _ALIGNMENT == 0 for size in weight.shape[1:])
    return "aligned" if fits else "unaligned"


def _eager(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Reads the counts on the host."""
    bounds = pairwise([0, *ends.tolist()])
    return torch.cat([F.linear(x[start:end], weight[group]) for group, (start, end) in enumerate(bounds)])


def _grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)


GROUPED_LINEAR = Operation(
    "grouped_linear",
    (
        Implementation(
            "grouped",
            _grouped,
            ("aligned",),
            needs=("grouped_mm",),
            dtypes=(torch.float32, torch.bfloat16, torch.float16),
        ),
        Implementation("eager", _eager, ("aligned", "unaligned")),
    ),
)
