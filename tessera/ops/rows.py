"""Rows of packed tensors: segment indices, indices after padding, and gathers whose backward pass is deterministic."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tessera.core.batch import Segments


def segment_of(segments: Segments, count: int) -> Tensor:
    """Return the segment index of each of `count` rows."""
    return _rows_and_segments(segments, count)[1]


def padded_slots(segments: Segments, count: int) -> Tensor:
    """Return the index of each of `count` rows after padding every segment to the longest."""
    at, segment = _rows_and_segments(segments, count)
    return at - segments.bounds[:-1][segment] + segment * segments.longest


def _rows_and_segments(segments: Segments, count: int) -> tuple[Tensor, Tensor]:
    at = torch.arange(count, device=segments.bounds.device, dtype=segments.bounds.dtype)
    return at, torch.searchsorted(segments.bounds[1:], at, right=True)


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Return `x[rows]` for distinct rows."""
    return _TakeRows.apply(x, rows)  # type: ignore[no-untyped-call]


def permute_rows(x: Tensor, order: Tensor, inverse: Tensor, copies: int = 1) -> Tensor:
    """Return row `order[i] // copies` of `x` for every i. `inverse`: inverse permutation of `order`."""
    return _PermuteRows.apply(x, order, inverse, copies)  # type: ignore[no-untyped-call]


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


class _PermuteRows(torch.autograd.Function):
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
