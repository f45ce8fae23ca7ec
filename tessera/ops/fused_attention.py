"""Packed attention on accelerators, as one custom operator for the compiler.

The kernel is chosen at run time by values on the host, so a batch that needs another kernel is not compiled again.
cuDNN is the fastest on Hopper, but builds a plan on the host for every new shape. It is used for shapes that are likely
to recur: rows of the training length with one segment each, long segments of one length (images of one size), and a
very long segment at the beginning (the video of a row, before its padding). Short segments (windows of an image, frames
of speech) have a Triton kernel in `short_attention`; all others use flash attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from tessera.core.batch import Segments
from tessera.ops.block_attention import block_attention, block_attention_backward
from tessera.ops.first_segment import (
    first_segment_attention,
    first_segment_backward,
    first_segment_serves,
    serves_heads,
    supports_here,
)
from tessera.runtime.torch_internals import cudnn_attention_backward, cudnn_attention_forward

Gradients = tuple[Tensor, Tensor, Tensor]
Kernel = Literal["cudnn", "cudnn and flash", "short", "flash"]

_LONG = 512  # segment length from which cuDNN is faster
_SHORT = 64  # maximum tokens of a segment for the "short" kernel: a thread block keeps a segment in its registers


def fused_attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments, causal: bool, scale: float) -> Tensor:
    """Return attention of `q` [T, Hq, D] to `k`, `v` [T, Hkv, D] inside each segment."""
    return _forward(q, k, v, segments.bounds, segments.extent, causal, scale)[0]


@torch.library.custom_op("tessera::packed_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, extent: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output, and flat log-sum-exp in the layout of the chosen kernel."""
    longest, rows, first = extent.tolist()
    kernel, count = _select_kernel(q, k, bounds, longest, rows, first, causal)
    if kernel == "cudnn and flash":
        out, lse = first_segment_attention(q, k, v, (first, first), scale)
    elif kernel == "cudnn":
        q_rows, k_rows, v_rows = (_split(x, count).transpose(1, 2) for x in (q, k, v))
        out, lse = cudnn_attention_forward(q_rows, k_rows, v_rows, causal, scale)
        out = out.transpose(1, 2)
    elif kernel == "short":
        from tessera.ops.short_attention import short_attention

        out, lse = short_attention(q, k, v, bounds, longest, causal, scale)
    else:
        out, lse = block_attention(q, k, v, segments=Segments(bounds, longest), causal=causal, scale=scale)
    return out.reshape(q.shape).contiguous(), lse.flatten()


@torch.library.custom_op("tessera::packed_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bounds: Tensor,
    extent: Tensor,
    causal: bool,
    scale: float,
) -> Gradients:
    longest, rows, first = extent.tolist()
    kernel, count = _select_kernel(q, k, bounds, longest, rows, first, causal)
    heads, length = q.shape[1], q.shape[0] // count
    gradients: Gradients
    if kernel == "cudnn and flash":
        dq, dk, dv = first_segment_backward(grad, q, k, v, out, lse, (first, first), scale)
    elif kernel == "cudnn":
        per_row = [_split(x, count).transpose(1, 2) for x in (grad, q, k, v, out)]
        gradients = cudnn_attention_backward(per_row, lse.view(count, heads, length, 1), causal, scale)
        dq, dk, dv = (x.transpose(1, 2) for x in gradients)
    elif kernel == "short":
        from tessera.ops.short_attention import short_attention_backward

        dq, dk, dv = short_attention_backward(grad, q, k, v, out, lse.view(heads, -1), bounds, longest, causal, scale)
    else:
        segments, sums = Segments(bounds, longest), lse.view(heads, -1)
        dq, dk, dv = block_attention_backward(grad, q, k, v, out, sums, segments=segments, causal=causal, scale=scale)
    return (
        dq.reshape(q.shape).to(q.dtype).contiguous(),
        dk.reshape(k.shape).to(k.dtype).contiguous(),
        dv.reshape(v.shape).to(v.dtype).contiguous(),
    )


def _select_kernel(
    q: Tensor, k: Tensor, bounds: Tensor, longest: int, rows: int, first: int, causal: bool
) -> tuple[Kernel, int]:
    """Return the kernel and its batch size: the number of segments or rows."""
    count, size = bounds.numel() - 1, q.shape[-1]
    planned = serves_heads(q, size)
    if rows and causal and planned:
        return "cudnn", rows
    if planned and longest >= _LONG and count > 1 and count * longest == q.shape[0]:
        return "cudnn", count
    if not causal and first_segment_serves(q, count, first):
        return "cudnn and flash", count
    if 0 < longest <= _SHORT and size <= 128 and supports_here(q.device, "triton"):
        return "short", count
    return "flash", count


def _split(x: Tensor, count: int) -> Tensor:
    """Return [T, H, D] as [count, T / count, H, D]."""
    return x.reshape(count, -1, *x.shape[1:])


# ---------------------------------------------------------------------------------------------- for the compiler


@_forward.register_fake
def _(q: Tensor, *others: Tensor | bool | float) -> tuple[Tensor, Tensor]:
    sums = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape), q.new_empty(q.shape[0] * q.shape[1], dtype=sums)


@_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Tensor | bool | float) -> Gradients:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, bounds, extent, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, bounds, extent)


def _differentiate(ctx, grad: Tensor, _: Tensor):  # type: ignore[no-untyped-def]
    return (*_backward(grad, *ctx.saved_tensors, ctx.causal, ctx.scale), None, None, None, None)


_forward.register_autograd(_differentiate, setup_context=_keep)


def backward_workspace(args: Sequence[Any]) -> int:
    """Return the bytes of temporary memory that the backward kernels need for these arguments.

    Flash attention sums the gradient of queries in fp32 and, for grouped heads, computes gradients of keys and values
    per query head. cuDNN needs less.
    """
    _, q, k = args[:3]
    grouped = 2 * q.nbytes if k.shape[1] != q.shape[1] else 0
    return int(4 * q.numel() + 4 * q.shape[0] * q.shape[1] + grouped)


# Operation -> bytes of workspace for its arguments. Memory estimates add them.
WORKSPACES: Mapping[Any, Callable[[Sequence[Any]], int]] = {
    torch.ops.tessera.packed_attention_backward.default: backward_workspace
}
