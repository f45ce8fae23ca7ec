"""Fused operators of Ascend's torch extension, `torch.ops.npu`, for uncompiled models.

Names, layouts and limits are those of the extension's release 2.14.0. Its own autograd computes the gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.core.batch import Segments

NEEDS: dict[str, Any] = {
    "needs": ("ascend_kernels",),
    "dtypes": (torch.bfloat16, torch.float16, torch.float32),
    "traced": False,
}
_MASK = 2048  # side of the compressed causal mask, for sequences of any length
_CAUSAL = 3  # sparse mode of the operator: compressed causal mask, in which the last query sees the last key
_MOST_SEGMENTS = 1024  # limit on the segments of one call


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dtype != weight.dtype or x.numel() == 0:  # the operator needs equal dtypes
        return F.rms_norm(x, weight.shape, weight, eps)
    return torch.ops.npu.npu_rms_norm(x, weight, epsilon=eps)[0]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up. The operator takes both in one tensor, and keeps only that tensor for backward."""
    if gate.numel() == 0:
        return F.silu(gate) * up
    return torch.ops.npu.npu_swiglu(torch.cat([gate, up], dim=-1), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, pairs: bool) -> Tensor:
    """Return `x` [T, H, D] with its first R dimensions rotated by angles [T, R / 2], in fp32 like the angles."""
    if x.numel() == 0:
        return x
    size = 2 * cos.shape[-1]
    cos, sin = (
        (a.repeat_interleave(2, dim=-1) if pairs else torch.cat([a, a], dim=-1))[None, :, None] for a in (cos, sin)
    )
    mode = "interleave" if pairs else "half"
    wide = x[None, ..., :size].float()  # layout BSND, one sequence
    turned = torch.ops.npu.npu_rotary_mul(wide, cos.float(), sin.float(), rotary_mode=mode)[0].to(x.dtype)
    return torch.cat([turned, x[..., size:]], dim=-1) if size < x.shape[-1] else turned


def packed_attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments, causal: bool, scale: float) -> Tensor:
    """Return attention of `q` [T, Hq, D] to `k`, `v` [T, Hkv, D] within each segment."""
    lengths = _lengths(segments)
    return _attention(q, k, v, lengths, lengths, causal, scale)


def packed_cross_attention(
    q: Tensor, k: Tensor, v: Tensor, q_segments: Segments, k_segments: Segments, scale: float
) -> Tensor:
    """Return attention of segment i of `q` to segment i of `k`, `v`; zero for samples without keys."""
    lengths, key_lengths = _lengths(q_segments), _lengths(k_segments)
    if all(keys or not queries for queries, keys in zip(lengths, key_lengths, strict=True)):
        return _attention(q, k, v, lengths, key_lengths, False, scale)
    # The documentation does not define the output of queries without keys, so these are left out of the call.
    alone = [queries > 0 and keys == 0 for queries, keys in zip(lengths, key_lengths, strict=True)]
    parts = torch.split(q, lengths)
    served = torch.cat([part for part, without in zip(parts, alone, strict=True) if not without])
    counts = [0 if without else length for length, without in zip(lengths, alone, strict=True)]
    outs = iter(torch.split(_attention(served, k, v, counts, key_lengths, False, scale), counts))
    return torch.cat([part * 0 if without else out for part, without, out in zip(parts, alone, outs, strict=True)])


def _attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], key_lengths: Sequence[int], causal: bool, scale: float
) -> Tensor:
    if len(lengths) > _MOST_SEGMENTS:
        groups = [slice(at, at + _MOST_SEGMENTS) for at in range(0, len(lengths), _MOST_SEGMENTS)]
        counts, key_counts = ([sum(every[group]) for group in groups] for every in (lengths, key_lengths))
        parts = zip(groups, torch.split(q, counts), *(torch.split(x, key_counts) for x in (k, v)), strict=True)
        return torch.cat(
            [_attention(a, b, c, lengths[group], key_lengths[group], causal, scale) for group, a, b, c in parts]
        )
    if q.numel() == 0:
        return q
    return torch.ops.npu.npu_fusion_attention(
        q,
        k,
        v,
        q.shape[1],
        "TND",
        atten_mask=_causal_mask(q.device) if causal else None,
        scale=scale,
        actual_seq_qlen=list(accumulate(lengths)),
        actual_seq_kvlen=list(accumulate(key_lengths)),
        sparse_mode=_CAUSAL if causal else 0,
    )[0]


def _lengths(segments: Segments) -> list[int]:
    """Return the lengths of segments; the host waits for the device if it does not know them."""
    return list(segments.lengths) or segments.bounds.diff().tolist()


@functools.cache
def _causal_mask(device: torch.device) -> Tensor:
    """Return the compressed causal mask: true hides a score."""
    return torch.ones(_MASK, _MASK, dtype=torch.bool, device=device).triu(1)
