"""Attention over packed pieces, and over a cache.

A packed row holds many pieces one after another; a token sees only its own piece. The padding tail of a row is a piece
of its own, so no implementation knows about padding.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.core.types import Segments
from tessera.ops.fused_attention import fused_attention
from tessera.ops.registry import AUTO, Implementation, Operation

AttentionWay = Literal["auto", "fused", "sdpa", "eager"]  # what a recipe may ask for
Window = tuple[int, int]  # how many earlier and later tokens are seen, besides the token itself; -1: no bound

# Padding pieces to the longest is one call and beats a loop until too much of the work is padding.
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
    """`q` [T, Hq, D] attends to `k`, `v` [T, Hkv, D] inside each segment; Hq is a multiple of Hkv. Returns [T, Hq, D].

    `segments` covers all T tokens. With `causal`, the later side of `window` is closed whatever it says.
    """
    if q.shape[0] == 0:
        return q
    left, right = (-1, -1) if window is None else window
    bounds = (left, 0 if causal else right)
    variant = {(-1, -1): "full", (-1, 0): "causal"}.get(bounds, "window")
    run = PACKED_ATTENTION.choose(implementation, variant, q.device, q.dtype)
    out: Tensor = run(q, k, v, segments, bounds, q.shape[-1] ** -0.5 if scale is None else scale)
    return out


def cached_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    *,
    scale: float | None = None,
    implementation: str = AUTO,
) -> Tensor:
    """One token per row: `q` [B, Hq, D] attends to the first `lengths` [B] of `k_cache`, `v_cache` [B, C, Hkv, D]."""
    run = CACHED_ATTENTION.choose(implementation, "plain", q.device, q.dtype)
    out: Tensor = run(q, k_cache, v_cache, lengths, q.shape[-1] ** -0.5 if scale is None else scale)
    return out


# ---------------------------------------------------------------------------------------------- eager: the reference


def _packed_eager(q: Tensor, k: Tensor, v: Tensor, segments: Segments, window: Window, scale: float) -> Tensor:
    bounds = segments.bounds.tolist()
    pieces = [
        _attend_explicitly(q[a:b], k[a:b], v[a:b], _window_mask(b - a, window, q.device), scale)
        for a, b in pairwise(bounds)
        if b > a
    ]
    return torch.cat(pieces)


def _attend_explicitly(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = torch.matmul(q.transpose(0, 1), k.permute(1, 2, 0)) * scale  # [H, L, L]
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    weights = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    return torch.matmul(weights, v.transpose(0, 1)).transpose(0, 1)


def _window_mask(length: int, window: Window, device: torch.device) -> Tensor | None:
    """[length, length], true where the row's token sees the column's; None when it sees everything."""
    left, right = window
    if left < 0 and right < 0:
        return None
    at = torch.arange(length, device=device)
    ahead = at.unsqueeze(0) - at.unsqueeze(1)
    mask = ahead.new_ones((), dtype=torch.bool)
    if left >= 0:
        mask = mask & (ahead >= -left)
    if right >= 0:
        mask = mask & (ahead <= right)
    return mask


def _cached_eager(q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, scale: float) -> Tensor:
    groups = q.shape[1] // k_cache.shape[2]
    k, v = k_cache.repeat_interleave(groups, dim=2), v_cache.repeat_interleave(groups, dim=2)
    scores = torch.einsum("bhd,bchd->bhc", q, k) * scale
    scores = scores.masked_fill(~_filled(k_cache, lengths).unsqueeze(1), float("-inf"))
    weights = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    return torch.einsum("bhc,bchd->bhd", weights, v)


def _filled(cache: Tensor, lengths: Tensor) -> Tensor:
    return torch.arange(cache.shape[1], device=cache.device).unsqueeze(0) < lengths.unsqueeze(1)


# ---------------------------------------------------------------------------------------------- sdpa: one batched call


def _packed_sdpa(q: Tensor, k: Tensor, v: Tensor, segments: Segments, window: Window, scale: float) -> Tensor:
    """Chooses its way by host data alone (counts and the longest piece), so that an accelerator is never waited for."""
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
    """Tokens of `count` pieces of one length; `key_mask` [count, length] tells real keys from padding."""
    length = q.shape[0] // count
    q, k, v = (x.reshape(count, length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
    # Padding lies behind the real tokens, so under a closed later side no real token can see it.
    causal = window == (-1, 0)
    mask = None if causal else _window_mask(length, window, q.device)
    if key_mask is not None and window[1] != 0:
        mask = key_mask[:, None, None, :] if mask is None else mask & key_mask[:, None, None, :]
        if window != (-1, -1):
            # A padding token may be out of reach of every real one; an empty softmax is NaN, so let it see itself.
            mask = mask | torch.eye(length, dtype=torch.bool, device=q.device)
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2).flatten(0, 1)


def _padded(q: Tensor, k: Tensor, v: Tensor, segments: Segments, window: Window, scale: float) -> Tensor:
    longest, count = segments.longest, segments.bounds.numel() - 1
    starts, ends = segments.bounds[:-1], segments.bounds[1:]
    at = torch.arange(q.shape[0], device=q.device, dtype=segments.bounds.dtype)
    piece = torch.searchsorted(ends, at, right=True)
    slots = at - starts[piece] + piece * longest
    # An empty piece keeps one key: all of it is padding and dropped below, and it must not become "not a number".
    key_mask = torch.arange(longest, device=q.device) < (ends - starts).clamp(min=1).unsqueeze(1)
    # Spreading by index_copy makes the backward pass a plain gather; gathering here would make it a slow scatter-add.
    q, k, v = (x.new_zeros(count * longest, *x.shape[1:]).index_copy(0, slots, x) for x in (q, k, v))
    return _batched(q, k, v, count, key_mask, window, scale).index_select(0, slots)


def _looped(q: Tensor, k: Tensor, v: Tensor, segments: Segments, window: Window, scale: float) -> Tensor:
    bounds = segments.bounds.tolist()
    return torch.cat([_batched(q[a:b], k[a:b], v[a:b], 1, None, window, scale) for a, b in pairwise(bounds) if b > a])


def _masked(q: Tensor, k: Tensor, v: Tensor, segments: Segments, window: Window, scale: float) -> Tensor:
    """All tokens against all, with everything outside the own piece masked."""
    at = torch.arange(q.shape[0], device=q.device, dtype=segments.bounds.dtype)
    piece = torch.searchsorted(segments.bounds[1:], at, right=True)
    mask = piece.unsqueeze(0) == piece.unsqueeze(1)
    inside = _window_mask(q.shape[0], window, q.device)
    mask = mask if inside is None else mask & inside
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.squeeze(0).transpose(0, 1)


def _cached_sdpa(q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, scale: float) -> Tensor:
    out = F.scaled_dot_product_attention(
        q.unsqueeze(2),
        k_cache.transpose(1, 2),
        v_cache.transpose(1, 2),
        attn_mask=_filled(k_cache, lengths)[:, None, None, :],
        scale=scale,
        enable_gqa=q.shape[1] != k_cache.shape[2],
    )
    return out.squeeze(2)


# ---------------------------------------------------------------------------------------------- fused: on accelerators


def _packed_fused(q: Tensor, k: Tensor, v: Tensor, segments: Segments, window: Window, scale: float) -> Tensor:
    return fused_attention(q, k, v, segments, window == (-1, 0), scale)


PACKED_ATTENTION = Operation(
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
CACHED_ATTENTION = Operation(
    "cached_attention", (Implementation("sdpa", _cached_sdpa), Implementation("eager", _cached_eager))
)
