"""Packed attention on accelerators, as one custom operator for the compiler.

The kernel is chosen at run time by values on the host, so that another kind of batch compiles nothing again. cuDNN is
the fastest on Hopper and builds a plan on the host for every new shape: it serves shapes that are likely to recur, rows
of the training length with one segment each, long segments of one length (images of one size), and a very long
segment at the beginning (the video of a row, before its padding). Short segments (windows of an image) have a Triton
kernel in `short_attention`; all others use flash attention.
"""

from __future__ import annotations

import functools
from typing import Literal

import torch
from torch import Tensor

from tessera.core import device as devices
from tessera.core.torch_internals import cudnn_attention_backward, cudnn_attention_forward
from tessera.core.types import Segments
from tessera.ops.block_attention import block_attention, block_attention_backward

Gradients = tuple[Tensor, Tensor, Tensor]
Kernel = Literal["cudnn", "cudnn and flash", "short", "flash"]

_LONG = 512  # tokens of a segment from which cuDNN is faster
_VERY_LONG = 4096  # tokens of a segment that is worth a plan of its own
_SHORT = 64  # tokens of a segment that fit into the registers of a thread block


def fused_attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments, causal: bool, scale: float) -> Tensor:
    """Return attention of `q` [T, Hq, D] to `k`, `v` [T, Hkv, D] inside each segment."""
    out: Tensor = _forward(q, k, v, segments.bounds, segments.extent, causal, scale)[0]
    return out


@torch.library.custom_op("tessera::packed_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, extent: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output, and log-sum-exp flattened in the layout of the chosen kernel."""
    longest, rows, first = extent.tolist()
    kernel, count = _select_kernel(q, k, bounds, longest, rows, first, causal)
    if kernel == "cudnn and flash":
        out, lse = _first_and_rest(q, k, v, first, scale)
    elif kernel == "cudnn":
        q_rows, k_rows, v_rows = (_split(x, count).transpose(1, 2) for x in (q, k, v))
        out, lse = cudnn_attention_forward(q_rows, k_rows, v_rows, causal, scale)
        out = out.transpose(1, 2)
    elif kernel == "short":
        from tessera.ops.short_attention import short_attention

        out, lse = short_attention(q, k, v, bounds, _SHORT, causal, scale)
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
    found: Gradients
    if kernel == "cudnn and flash":
        dq, dk, dv = _first_and_rest_backward(grad, q, k, v, out, lse, first, scale)
    elif kernel == "cudnn":
        per_row = [_split(x, count).transpose(1, 2) for x in (grad, q, k, v, out)]
        found = cudnn_attention_backward(per_row, lse.view(count, heads, length, 1), causal, scale)
        dq, dk, dv = (x.transpose(1, 2) for x in found)
    elif kernel == "short":
        from tessera.ops.short_attention import short_attention_backward

        dq, dk, dv = short_attention_backward(grad, q, k, v, out, lse.view(heads, -1), bounds, _SHORT, causal, scale)
    else:
        segments, sums = Segments(bounds, longest), lse.view(heads, -1)
        dq, dk, dv = block_attention_backward(grad, q, k, v, out, sums, segments=segments, causal=causal, scale=scale)
    return (
        dq.reshape(q.shape).to(q.dtype).contiguous(),
        dk.reshape(k.shape).to(k.dtype).contiguous(),
        dv.reshape(v.shape).to(v.dtype).contiguous(),
    )


def _first_and_rest(q: Tensor, k: Tensor, v: Tensor, first: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return attention inside the first segment by cuDNN, and inside the second, if there is one, by flash."""
    rows = [x[None, :first].transpose(1, 2) for x in (q, k, v)]
    out, lse = cudnn_attention_forward(rows[0], rows[1], rows[2], False, scale)
    out, lse = out.transpose(1, 2)[0], lse.flatten()
    if first == q.shape[0]:
        return out, lse
    q, k, v = (x[first:] for x in (q, k, v))
    rest, rest_lse = block_attention(q, k, v, segments=None, causal=False, scale=scale)
    return torch.cat([out, rest]), torch.cat([lse, rest_lse.flatten()])


def _first_and_rest_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, first: int, scale: float
) -> Gradients:
    heads = q.shape[1]
    rows = [x[None, :first].transpose(1, 2) for x in (grad, q, k, v, out)]
    sums, rest_sums = lse[: heads * first], lse[heads * first :]
    found = cudnn_attention_backward(rows, sums.view(1, heads, first, 1), False, scale)
    dq, dk, dv = (x.transpose(1, 2)[0] for x in found)
    if first == q.shape[0]:
        return dq, dk, dv
    grad, q, k, v, out = (x[first:] for x in (grad, q, k, v, out))
    rest = block_attention_backward(
        grad, q, k, v, out, rest_sums.view(heads, -1), segments=None, causal=False, scale=scale
    )
    rest_dq, rest_dk, rest_dv = (x.to(q.dtype) for x in rest)
    return torch.cat([dq, rest_dq]), torch.cat([dk, rest_dk]), torch.cat([dv, rest_dv])


def _select_kernel(
    q: Tensor, k: Tensor, bounds: Tensor, longest: int, rows: int, first: int, causal: bool
) -> tuple[Kernel, int]:
    """Return the kernel and its batch size: number of segments, or of rows."""
    count, size = bounds.numel() - 1, q.shape[-1]
    planned = size % 8 == 0 and size <= 128 and _supports(q.device, "cudnn_attention")
    if rows and causal and planned:
        return "cudnn", rows
    if planned and longest >= _LONG and count > 1 and count * longest == q.shape[0]:
        return "cudnn", count
    if planned and not causal and count <= 2 and first >= _VERY_LONG:
        return "cudnn and flash", count
    # The short kernel does not support grouped heads, which vision encoders do not have.
    if 0 < longest <= _SHORT and size <= 128 and q.shape == k.shape and _supports(q.device, "triton"):
        return "short", count
    return "flash", count


@functools.cache
def _supports(device: torch.device, what: str) -> bool:
    """Return whether the device has the capability, cached: asking the driver takes long.

    Custom operators are not traced, so that the compiler does not warn about the cache.
    """
    return devices.supports(device, what)


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
