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
from tessera.ops.fused_attention import fused_attention
from tessera.ops.registry import AUTO, DispatchedOp, Implementation
from tessera.ops.rows import padded_slots, segment_of

AttentionBackend = Literal["auto", "fused", "sdpa", "eager"]  # values of the recipe key
Window = tuple[int, int]  # number of earlier and later tokens attended to, besides the token itself; -1: all

# Padding all segments to the longest takes one call, which beats a loop unless too much of the work is padding.
_MAX_PADDED_SHARE = 2.0


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments,
    *,
    causal: bool,
    window: Window | None = None,
    scale: float | None = None,
    implementation: str = AUTO,
) -> Tensor:
    """Return attention [T, Hq, D] of `q` [T, Hq, D] to `k`, `v` [T, Hkv, D] inside each segment.

    Hq is a multiple of Hkv, and `segments` cover all T tokens. With `causal`, no token attends to later ones, also
    inside of `window`.
    """
    if q.shape[0] == 0:
        return q
    earlier, later = (-1, -1) if window is None else window
    bounds = (earlier, 0 if causal else later)
    variant = {(-1, -1): "full", (-1, 0): "causal"}.get(bounds, "window")
    run = PACKED_ATTENTION.choose(implementation, variant, q.device, q.dtype)
    out: Tensor = run(q, k, v, segments, bounds, q.shape[-1] ** -0.5 if scale is None else scale)
    return out


# ---------------------------------------------------------------------------------------------- eager: the reference


def _packed_eager(q: Tensor, k: Tensor, v: Tensor, segments: Segments, window: Window, scale: float) -> Tensor:
    bounds = segments.bounds.tolist()
    outputs = [
        attend_explicitly(q[a:b], k[a:b], v[a:b], _window_mask(b - a, window, q.device), scale)
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


def _window_mask(length: int, window: Window, device: torch.device) -> Tensor | None:
    """Return a mask [length, length], true where the row's token attends to the column's; None: everywhere."""
    earlier, later = window
    if earlier < 0 and later < 0:
        return None
    at = torch.arange(length, device=device)
    ahead = at.unsqueeze(0) - at.unsqueeze(1)
    mask = ahead.new_ones((), dtype=torch.bool)
    if earlier >= 0:
        mask = mask & (ahead >= -earlier)
    if later >= 0:
        mask = mask & (ahead <= later)
    return mask


# ---------------------------------------------------------------------------------------------- sdpa: one batched call


def _packed_sdpa(q: Tensor, k: Tensor, v: Tensor, segments: Segments, window: Window, scale: float) -> Tensor:
    """Choose an algorithm by host data alone, so that the host never waits for the device."""
    tokens, longest, count = q.shape[0], segments.longest, segments.bounds.numel() - 1
    if count * longest == tokens:
        return _batched(q, k, v, count, None, window, scale)
    if count * longest <= _MAX_PADDED_SHARE * tokens:
        return _padded(q, k, v, segments, window, scale)
    if q.device.type == "cpu" and not torch.compiler.is_compiling():  # the loop reads bounds, which a graph cannot
        return _looped(q, k, v, segments, window, scale)
    if count * longest * longest <= tokens * tokens:
        return _padded(q, k, v, segments, window, scale)
    return _masked(q, k, v, segments, window, scale)


def _batched(
    q: Tensor, k: Tensor, v: Tensor, count: int, key_mask: Tensor | None, window: Window, scale: float
) -> Tensor:
    """Attend inside `count` segments of one length; `key_mask` [count, length] is false for padding."""
    length = q.shape[0] // count
    q, k, v = (x.reshape(count, length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
    # Padding follows the real tokens, so without attention to later tokens no real token attends to it.
    causal = window == (-1, 0)
    mask = None if causal else _window_mask(length, window, q.device)
    if key_mask is not None and window[1] != 0:
        mask = key_mask[:, None, None, :] if mask is None else mask & key_mask[:, None, None, :]
        if window != (-1, -1):
            # A padding token may be outside the window of every real one; an empty softmax is NaN, so it attends to
            # itself.
            mask = mask | torch.eye(length, dtype=torch.bool, device=q.device)
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2).flatten(0, 1)


def _padded(q: Tensor, k: Tensor, v: Tensor, segments: Segments, window: Window, scale: float) -> Tensor:
    longest, count = segments.longest, segments.bounds.numel() - 1
    slots = padded_slots(segments, q.shape[0])
    # An empty segment keeps one key, so that its softmax is not NaN; its output is dropped below.
    key_mask = torch.arange(longest, device=q.device) < segments.bounds.diff().clamp(min=1).unsqueeze(1)
    # The backward pass of index_copy is a gather; a gather here would need a slow scatter-add in backward.
    q, k, v = (x.new_zeros(count * longest, *x.shape[1:]).index_copy(0, slots, x) for x in (q, k, v))
    return _batched(q, k, v, count, key_mask, window, scale).index_select(0, slots)


def _looped(q: Tensor, k: Tensor, v: Tensor, segments: Segments, window: Window, scale: float) -> Tensor:
    bounds = segments.bounds.tolist()
    return torch.cat([_batched(q[a:b], k[a:b], v[a:b], 1, None, window, scale) for a, b in pairwise(bounds) if b > a])


def _masked(q: Tensor, k: Tensor, v: Tensor, segments: Segments, window: Window, scale: float) -> Tensor:
    """Attend to all tokens, with a mask for those of other segments."""
    segment = segment_of(segments, q.shape[0])
    mask = segment.unsqueeze(0) == segment.unsqueeze(1)
    inside = _window_mask(q.shape[0], window, q.device)
    mask = mask if inside is None else mask & inside
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.squeeze(0).transpose(0, 1)


# ---------------------------------------------------------------------------------------------- fused: on accelerators


def _packed_fused(q: Tensor, k: Tensor, v: Tensor, segments: Segments, window: Window, scale: float) -> Tensor:
    return fused_attention(q, k, v, segments, window == (-1, 0), scale)


PACKED_ATTENTION = DispatchedOp(
    "packed_attention",
    (
        Implementation(
            "fused",
            _packed_fused,
            ("full", "causal"),
            needs=("flash_attention",),
            dtypes=(torch.bfloat16, torch.float16),
        ),
        Implementation("sdpa", _packed_sdpa, ("full", "causal", "window")),
        Implementation("eager", _packed_eager, ("full", "causal", "window")),
    ),
)
