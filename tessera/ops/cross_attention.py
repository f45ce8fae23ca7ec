"""Attention of one packed sequence to another: the latents of a sample to the text of the same sample.

Both sequences have one segment per sample, in the same order. A sample without keys (padding, a dropped caption of no
tokens) attends to nothing, and its output is zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tessera.core.batch import Segments
from tessera.ops import ascend_kernels
from tessera.ops.block_attention import pad_heads
from tessera.ops.first_segment import first_segment_attention, first_segment_backward, first_segment_serves
from tessera.ops.packed_sdpa import by_sample, packed_sdpa
from tessera.ops.registry import AUTO, DispatchedOp, Implementation
from tessera.runtime.torch_internals import flash_attention_backward, flash_attention_forward

Gradients = tuple[Tensor, Tensor, Tensor]


def packed_cross_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_segments: Segments,
    k_segments: Segments,
    *,
    scale: float | None = None,
    implementation: str = AUTO,
) -> Tensor:
    """Return attention [T, H, D] of segment i of `q` [T, H, D] to segment i of `k`, `v` [L, H, D]."""
    assert q_segments.bounds.shape == k_segments.bounds.shape, "queries and keys have segments of the same samples"
    if q.shape[0] == 0 or k.shape[0] == 0 or _apart(q_segments, k_segments):
        # A rank may have only padding. Its keys stay in the autograd graph, because other ranks wait for their
        # gradients.
        return q * 0 + k[:0].sum() + v[:0].sum()
    run = PACKED_CROSS_ATTENTION.choose(implementation, "plain", q.device, q.dtype)
    return run(q, k, v, q_segments, k_segments, q.shape[-1] ** -0.5 if scale is None else scale)


def _apart(q_segments: Segments, k_segments: Segments) -> bool:
    """Return whether no segment has both queries and keys; False if the host does not know the lengths.

    Compiled code returns False: it would otherwise be compiled again for every number of segments.
    """
    if torch.compiler.is_compiling() or not q_segments.lengths:
        return False
    return not any(a and b for a, b in zip(q_segments.lengths, k_segments.lengths, strict=True))


def _eager(q: Tensor, k: Tensor, v: Tensor, q_segments: Segments, k_segments: Segments, scale: float) -> Tensor:
    outputs = []
    for queries, keys, values in by_sample(q, k, v, q_segments, k_segments):
        scores = torch.einsum("thd,lhd->htl", queries, keys) * scale
        weights = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
        outputs.append(torch.einsum("htl,lhd->thd", weights, values))
    return torch.cat(outputs)


# ---------------------------------------------------------------------------------------------- fused: on accelerators


def _fused(q: Tensor, k: Tensor, v: Tensor, q_segments: Segments, k_segments: Segments, scale: float) -> Tensor:
    extents = (q_segments.bounds, k_segments.bounds, q_segments.extent, k_segments.extent)
    return _forward(q, k, v, *extents, scale)[0]


@torch.library.custom_op("tessera::packed_cross_attention", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    key_bounds: Tensor,
    extent: Tensor,
    key_extent: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return the output and log-sum-exp. Lengths are tensors, because torch.compile treats Python ints as constants."""
    longest, size = (int(extent[0]), int(key_extent[0])), q.shape[-1]
    first = int(extent[2]), int(key_extent[2])
    if _by_first_segment(q, bounds, first):
        out, lse = first_segment_attention(q, k, v, first, scale)
        return out.contiguous(), lse.view(q.shape[1], q.shape[0])
    q, k, v = (pad_heads(x) for x in (q, k, v))
    out, lse = flash_attention_forward(q, k, v, (bounds, key_bounds), longest, False, scale)
    return out[..., :size].contiguous(), lse.contiguous()


@torch.library.custom_op("tessera::packed_cross_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bounds: Tensor,
    key_bounds: Tensor,
    extent: Tensor,
    key_extent: Tensor,
    scale: float,
) -> Gradients:
    longest, size = (int(extent[0]), int(key_extent[0])), q.shape[-1]
    first = int(extent[2]), int(key_extent[2])
    if _by_first_segment(q, bounds, first):
        dq, dk, dv = first_segment_backward(grad, q, k, v, out, lse.flatten(), first, scale)
        return dq.contiguous(), dk.contiguous(), dv.contiguous()
    grad, q, k, v, out = (pad_heads(x) for x in (grad, q, k, v, out))
    gradients = flash_attention_backward(grad, q, k, v, out, lse, (bounds, key_bounds), longest, False, scale)
    dq, dk, dv = (x[..., :size].contiguous() for x in gradients)
    return dq, dk, dv


def _by_first_segment(q: Tensor, bounds: Tensor, first: tuple[int, int]) -> bool:
    return first[1] > 0 and first_segment_serves(q, bounds.numel() - 1, first[0])


@_forward.register_fake
def _(q: Tensor, *others: Tensor | float) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


@_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Tensor | float) -> Gradients:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, *extents, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, *extents)


def _differentiate(ctx, grad: Tensor, _: Tensor):  # type: ignore[no-untyped-def]
    return (*_backward(grad, *ctx.saved_tensors, ctx.scale), None, None, None, None, None)


_forward.register_autograd(_differentiate, setup_context=_keep)

PACKED_CROSS_ATTENTION = DispatchedOp(
    "packed_cross_attention",
    (
        Implementation("fused", _fused, needs=("flash_attention",), dtypes=(torch.bfloat16, torch.float16)),
        Implementation("fused", ascend_kernels.packed_cross_attention, **ascend_kernels.NEEDS),
        Implementation("sdpa", packed_sdpa),
        Implementation("eager", _eager),
    ),
)
