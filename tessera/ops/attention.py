"""Attention over packed sequences.

A packed row is a concatenation of segments; a token attends to its own segment. The padding at the end of a row is a
segment of its own, so implementations need no padding mask.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from tessera.core.batch import Segments
from tessera.ops import ascend_kernels
from tessera.ops.fused_attention import fused_attention
from tessera.ops.packed_sdpa import packed_sdpa
from tessera.ops.registry import AUTO, DispatchedOp, Implementation

AttentionBackend = Literal["auto", "fused", "sdpa", "eager"]  # allowed values of model.config.attention


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


def _packed_sdpa(q: Tensor, k: Tensor, v: Tensor, segments: Segments, causal: bool, scale: float) -> Tensor:
    return packed_sdpa(q, k, v, segments, None, scale, causal)


PACKED_ATTENTION = DispatchedOp(
    "packed_attention",
    (
        Implementation("fused", fused_attention, needs=("flash_attention",), dtypes=(torch.bfloat16, torch.float16)),
        Implementation("fused", ascend_kernels.packed_attention, **ascend_kernels.NEEDS),
        Implementation("sdpa", _packed_sdpa),
        Implementation("eager", _packed_eager),
    ),
)
