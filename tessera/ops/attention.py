"""Attention over packed sequences.

A packed row is a concatenation of segments; a token attends to its own segment. The padding at the end of a row is a
segment of its own, so implementations need no padding mask.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.core.batch import Segments
from tessera.ops import ascend_kernels
from tessera.ops.fused_attention import fused_attention
from tessera.ops.registry import AUTO, DispatchedOp, Implementation
from tessera.ops.rows import padded_slots, segment_of

AttentionBackend = Literal["auto", "fused", "sdpa", "eager"]  # allowed values of model.config.attention

# If padding multiplies the number of tokens by at most this, one padded call is faster than a loop.
_MAX_PADDED_SHARE = 2.0


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments,
    *,
    causal: bool,
    scale: float | None = None,
    implementation: str = AUTO,
) -> Tensor:
    """Return attention [T, Hq, D] of `q` [T, Hq, D] to `k`, `v` [T, Hkv, D] within each segment.

    Hq is a multiple of Hkv, and `segments` cover all T tokens. `causal`: no token attends to later ones.
    """
    if q.shape[0] == 0:
        return q
    run = PACKED_ATTENTION.choose(implementation, "plain", q.device, q.dtype)
    return run(q, k, v, segments, causal, q.shape[-1] ** -0.5 if scale is None else scale)


# ---------------------------------------------------------------------------------------------- eager: the reference


def _packed_eager(q: Tensor, k: Tensor, v: Tensor, segments: Segments, causal: bool, scale: float) -> Tensor:
    bounds = segments.bounds.tolist()
    outputs = [
        attend_explicitly(q[a:b], k[a:b], v[a:b], _causal_mask(b - a, q.device) if causal else None, scale)
        for a, b in pairwise(bounds)
        if b > a
    ]
    return torch.cat(outputs)


def attend_explicitly(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = torch.matmul(q.transpose(0, 1), k.permute(1, 2, 0)) * scale  # [H, L, L]
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    weights = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    return torch.matmul(weights, v.transpose(0, 1)).transpose(0, 1)


def _causal_mask(length: int, device: torch.device) -> Tensor:
    """Return a mask [length, length], true where the row's token attends to the column's token."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


# ---------------------------------------------------------------------------------------------- sdpa: one batched call


def _packed_sdpa(q: Tensor, k: Tensor, v: Tensor, segments: Segments, causal: bool, scale: float) -> Tensor:
    """Compute attention by an algorithm that is chosen from host data only, so that the host never waits for the
    device.
    """
    tokens, longest, count = q.shape[0], segments.longest, segments.bounds.numel() - 1
    if count * longest == tokens:
        return _batched(q, k, v, count, None, causal, scale)
    if count * longest <= _MAX_PADDED_SHARE * tokens:
        return _padded(q, k, v, segments, causal, scale)
    # a loop over segments reads `bounds` on the host, which compiled graphs cannot
    if q.device.type == "cpu" and not torch.compiler.is_compiling():
        return _looped(q, k, v, segments, causal, scale)
    if count * longest * longest <= tokens * tokens:
        return _padded(q, k, v, segments, causal, scale)
    return _masked(q, k, v, segments, causal, scale)


def _batched(
    q: Tensor, k: Tensor, v: Tensor, count: int, key_mask: Tensor | None, causal: bool, scale: float
) -> Tensor:
    """Attend within `count` segments of equal length. `key_mask` [count, length] is false for padding."""
    length = q.shape[0] // count
    q, k, v = (x.reshape(count, length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
    # Padding follows the real tokens, so in causal attention no real token attends to it.
    mask = None if causal or key_mask is None else key_mask[:, None, None, :]
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2).flatten(0, 1)


def _padded(q: Tensor, k: Tensor, v: Tensor, segments: Segments, causal: bool, scale: float) -> Tensor:
    longest, count = segments.longest, segments.bounds.numel() - 1
    slots = padded_slots(segments, q.shape[0])
    # An empty segment keeps one key, because a softmax without keys is NaN; its output is dropped.
    key_mask = torch.arange(longest, device=q.device) < segments.bounds.diff().clamp(min=1).unsqueeze(1)
    # index_copy, because its backward pass is a gather; indexing here would need a slow scatter-add in backward.
    q, k, v = (x.new_zeros(count * longest, *x.shape[1:]).index_copy(0, slots, x) for x in (q, k, v))
    return _batched(q, k, v, count, key_mask, causal, scale).index_select(0, slots)


def _looped(q: Tensor, k: Tensor, v: Tensor, segments: Segments, causal: bool, scale: float) -> Tensor:
    bounds = segments.bounds.tolist()
    return torch.cat([_batched(q[a:b], k[a:b], v[a:b], 1, None, causal, scale) for a, b in pairwise(bounds) if b > a])


def _masked(q: Tensor, k: Tensor, v: Tensor, segments: Segments, causal: bool, scale: float) -> Tensor:
    """Attend over all tokens, with a mask that excludes other segments."""
    segment = segment_of(segments, q.shape[0])
    mask = segment.unsqueeze(0) == segment.unsqueeze(1)
    mask = mask & _causal_mask(q.shape[0], q.device) if causal else mask
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.squeeze(0).transpose(0, 1)


PACKED_ATTENTION = DispatchedOp(
    "packed_attention",
    (
        Implementation("fused", fused_attention, needs=("flash_attention",), dtypes=(torch.bfloat16, torch.float16)),
        Implementation("fused", ascend_kernels.packed_attention, **ascend_kernels.NEEDS),
        Implementation("sdpa", _packed_sdpa),
        Implementation("eager", _packed_eager),
    ),
)
