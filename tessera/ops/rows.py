"""Some rows of a tensor: those that are asked for, or as many as are worked on at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def in_chunks(rows: int, most: int) -> Iterator[slice]:
    """All of them, in as few chunks as there must be, and these as even as can be."""
    size = -(-rows // max(1, -(-rows // most)))
    for start in range(0, rows, max(1, size)):
        yield slice(start, start + size)


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """`x[rows]`. No row is taken twice, so that the gradient is a plain copy: torch, which cannot know, adds up."""
    found: Tensor = _TakeRows.apply(x, rows)  # type: ignore[no-untyped-call]
    return found


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.count = x.shape[0]
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return grads[0].new_zeros(ctx.count, *grads[0].shape[1:]).index_copy_(0, rows, grads[0]), None
