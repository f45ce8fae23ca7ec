"""Packed attention on accelerators, one operation to a compiler. Which kernel carries it out is decided when it runs,
by numbers that the host knows: a batch of another kind compiles nothing again.

cuDNN is the fastest on Hopper chips and builds a plan on the host for every new shape: it gets what is likely to come
again, rows of the training length with one piece each and long pieces of one length (pictures of one size). Short
pieces (windows of a picture) have a kernel of ours, all others go to flash attention.
"""

from __future__ import annotations

import functools
from typing import Literal

import torch
from torch import Tensor

from tessera.core import device as devices
from tessera.core.types import Segments
from tessera.ops.block_attention import block_attention, block_attention_backward

Gradients = tuple[Tensor, Tensor, Tensor]
Way = Literal["cudnn", "short", "pieces"]

_LONG = 512  # tokens, from which cuDNN is the faster one
_SHORT = 64  # tokens of a window: what fits into the registers of a block of threads


def fused_attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments, causal: bool, scale: float) -> Tensor:
    """`q` [T, Hq, D] over `k`, `v` [T, Hkv, D], inside each segment."""
    out: Tensor = _forward(q, k, v, segments.bounds, segments.extent, causal, scale)[0]
    return out


@torch.library.custom_op("tessera::packed_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, extent: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """The result, and logs of sums of exponentials in the order that the chosen kernel likes."""
    longest, rows = extent.tolist()
    way, count = _way(q, k, bounds, longest, rows, causal)
    if way == "cudnn":
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *(_split(x, count).transpose(1, 2) for x in (q, k, v)), None, True, 0.0, causal, scale=scale
        )
        out = out.transpose(1, 2)
    elif way == "short":
        from tessera.ops.short_attention import short_attention

        out, lse = short_attention(q, k, v, bounds, _SHORT, causal, scale)
    else:
        out, lse = block_attention(q, k, v, pieces=Segments(bounds, longest), causal=causal, scale=scale)
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
    longest, rows = extent.tolist()
    way, count = _way(q, k, bounds, longest, rows, causal)
    heads, length = q.shape[1], q.shape[0] // count
    found: Gradients
    if way == "cudnn":
        chance = torch.empty((), dtype=torch.int64, device=q.device)  # the state of a dropout that there is not
        found = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *(_split(x, count).transpose(1, 2) for x in (grad, q, k, v, out)),
            *(lse.view(count, heads, length, 1), chance, chance, None, None, None, length, length, 0.0, causal),
            scale=scale,
        )
        dq, dk, dv = (x.transpose(1, 2) for x in found)
    elif way == "short":
        from tessera.ops.short_attention import short_attention_backward

        dq, dk, dv = short_attention_backward(grad, q, k, v, out, lse.view(heads, -1), bounds, _SHORT, causal, scale)
    else:
        pieces, sums = Segments(bounds, longest), lse.view(heads, -1)
        dq, dk, dv = block_attention_backward(grad, q, k, v, out, sums, pieces=pieces, causal=causal, scale=scale)
    return (
        dq.reshape(q.shape).to(q.dtype).contiguous(),
        dk.reshape(k.shape).to(k.dtype).contiguous(),
        dv.reshape(v.shape).to(v.dtype).contiguous(),
    )


def _way(q: Tensor, k: Tensor, bounds: Tensor, longest: int, rows: int, causal: bool) -> tuple[Way, int]:
    """Which kernel, and how many pieces or rows it is given."""
    pieces, size = bounds.numel() - 1, q.shape[-1]
    planned = size % 8 == 0 and size <= 128 and _supports(q.device, "cudnn_attention")
    if rows and causal and planned:
        return "cudnn", rows
    if planned and longest >= _LONG and pieces > 1 and pieces * longest == q.shape[0]:
        return "cudnn", pieces
    # Grouped heads, which windows of pictures do not have, are left to flash attention.
    if 0 < longest <= _SHORT and size <= 128 and q.shape == k.shape and _supports(q.device, "triton"):
        return "short", pieces
    return "pieces", pieces


@functools.cache
def _supports(device: torch.device, what: str) -> bool:
    """The driver takes its time to answer and is asked at every call. Compilers, which warn of functions that remember,
    do not trace what is in here."""
    return devices.supports(device, what)


def _split(x: Tensor, count: int) -> Tensor:
    """[T, H, D] -> [count, T / count, H, D]"""
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
