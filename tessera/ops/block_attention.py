"""Attention of queries to one block of their keys, with log-sum-exp: the step of ring attention.

Outputs over different blocks are merged by their log-sum-exp (`join`). The backward pass is a function of its own,
which takes the merged output and log-sum-exp and returns the gradient through one block.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.core.batch import Segments
from tessera.ops.registry import AUTO, DispatchedOp, Implementation
from tessera.runtime.torch_internals import flash_attention_backward, flash_attention_forward

BlockSegments = Segments | None  # None: every query attends to every key


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    segments: BlockSegments,
    causal: bool,
    scale: float,
    implementation: str = AUTO,
) -> tuple[Tensor, Tensor]:
    """Return attention [Tq, Hq, D] of `q` [Tq, Hq, D] to `k`, `v` [Tk, Hkv, D], and log-sum-exp [Hq, Tq].

    Log-sum-exp is in fp32 or wider. With `segments`, queries and keys are the same packed tokens; without segments
    there is no mask. Autograd is not supported.
    """
    assert segments is not None or not causal, "causal attention needs segments"
    run = BLOCK_ATTENTION.choose(implementation, "plain", q.device, q.dtype)
    return run(q, k, v, segments, causal, scale)


def block_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    segments: BlockSegments,
    causal: bool,
    scale: float,
    implementation: str = AUTO,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v through this block, given `out` and `lse` over all keys."""
    run = BLOCK_ATTENTION_BACKWARD.choose(implementation, "plain", q.device, q.dtype)
    return run(grad, q, k, v, out, lse, segments, causal, scale)


def join(out: Tensor, lse: Tensor, rows: slice, other: Tensor, other_lse: Tensor) -> None:
    """Merge the output `other` of further keys into `rows` of `out` [T, H, D] and `lse` [H, T], in place."""
    before = lse[:, rows]
    both = torch.logaddexp(before, other_lse)
    keep, add = ((part - both).exp().t().unsqueeze(-1) for part in (before, other_lse))
    out[rows] = out[rows] * keep + other * add
    lse[:, rows] = both


def wide(x: Tensor) -> Tensor:
    """Return `x` in fp32 or wider, for sums over several blocks."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


# ---------------------------------------------------------------------------------------------- eager: the reference


def _eager(
    q: Tensor, k: Tensor, v: Tensor, segments: BlockSegments, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    outs, sums = [], []
    for at in _slices(segments):
        scores = _scores(q[at], k[at], causal, scale)
        lse = scores.logsumexp(-1)
        outs.append((scores - lse.unsqueeze(-1)).exp() @ _by_head(v[at], q.shape[1]))
        sums.append(lse)
    return torch.cat(outs, 1).transpose(0, 1).to(q.dtype), torch.cat(sums, 1)


def _eager_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: BlockSegments,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    heads, kv_heads = q.shape[1], k.shape[1]
    for at in _slices(segments):
        weights = (_scores(q[at], k[at], causal, scale) - lse[:, at].unsqueeze(-1)).exp()  # [H, Lq, Lk]
        head_grads = _by_head(grad[at], heads)
        mean = (head_grads * _by_head(out[at], heads)).sum(-1, keepdim=True)
        inner = weights * (head_grads @ _by_head(v[at], heads).transpose(1, 2) - mean) * scale
        dq, dk, dv = (
            inner @ _by_head(k[at], heads),
            inner.transpose(1, 2) @ _by_head(q[at], heads),
            weights.transpose(1, 2) @ head_grads,
        )
        dk, dv = (x.reshape(kv_heads, -1, *x.shape[1:]).sum(1) for x in (dk, dv))
        parts.append((dq, dk, dv))
    dq, dk, dv = (torch.cat(x, 1).transpose(0, 1) for x in zip(*parts, strict=True))
    return dq, dk, dv


def _slices(segments: BlockSegments) -> list[slice]:
    if segments is None:
        return [slice(None)]
    ends = list(accumulate(segments.lengths)) if segments.lengths else segments.bounds[1:].tolist()
    return [slice(a, b) for a, b in zip([0, *ends], ends, strict=False) if b > a]


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    """Return scores [H, Lq, Lk] in fp32 or wider."""
    scores = _by_head(q, q.shape[1]) @ _by_head(k, q.shape[1]).transpose(1, 2) * scale
    if causal:
        later = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores


def _by_head(x: Tensor, heads: int) -> Tensor:
    """Return [L, h, D] as [heads, L, D] in fp32 or wider, with key-value heads repeated for grouped queries."""
    return wide(x).transpose(0, 1).repeat_interleave(heads // x.shape[1], dim=0)


# ---------------------------------------------------------------------------------------------- flash: on accelerators


def _flash(
    q: Tensor, k: Tensor, v: Tensor, segments: BlockSegments, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    size = q.shape[-1]
    q, k, v = (pad_heads(x) for x in (q, k, v))
    out, lse = flash_attention_forward(q, k, v, *_extents(q, k, segments), causal, scale)
    return out[..., :size], lse


def _flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: BlockSegments,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    size = q.shape[-1]
    grad, q, k, v, out = (pad_heads(x) for x in (grad, q, k, v, out))
    extents = _extents(q, k, segments)
    dq, dk, dv = flash_attention_backward(grad, q, k, v, out, lse.contiguous(), *extents, causal, scale)
    return dq[..., :size], dk[..., :size], dv[..., :size]


def _extents(q: Tensor, k: Tensor, segments: BlockSegments) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    """Return the bounds and the largest lengths of the segments, of queries and of keys.

    Without segments, all tokens are one segment. Its bounds are computed on the device, so that nothing is copied.
    """
    if segments is not None:
        return (segments.bounds, segments.bounds), (segments.longest, segments.longest)
    both = torch.arange(2, dtype=torch.int32, device=q.device)
    return (both * q.shape[0], both * k.shape[0]), (q.shape[0], k.shape[0])


def pad_heads(x: Tensor) -> Tensor:
    """Return `x` with the head size zero-padded to a multiple of 8, which the kernel requires."""
    size = x.shape[-1]
    x = F.pad(x, (0, -size % 8)) if size % 8 else x
    return x if x.stride(-1) == 1 else x.contiguous()


_FLASH: dict[str, Any] = {"needs": ("flash_attention",), "dtypes": (torch.bfloat16, torch.float16)}
BLOCK_ATTENTION = DispatchedOp(
    "block_attention", (Implementation("flash", _flash, **_FLASH), Implementation("eager", _eager))
)
BLOCK_ATTENTION_BACKWARD = DispatchedOp(
    "block_attention_backward",
    (Implementation("flash", _flash_backward, **_FLASH), Implementation("eager", _eager_backward)),
)
