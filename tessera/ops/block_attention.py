"""Attention of some queries to some of their keys: parts that a ring of ranks puts together.

The log of the sum of exponentials comes with the result, so that results over other keys can be joined to it. Backward
is a function of its own: it is given the joined result, and so finds each part's share of the whole gradient.
"""

from __future__ import annotations

from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.core.types import Segments
from tessera.ops.registry import AUTO, Implementation, Operation

Pieces = Segments | None  # None: one rectangle, every query sees every key


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pieces: Pieces,
    causal: bool,
    scale: float,
    implementation: str = AUTO,
) -> tuple[Tensor, Tensor]:
    """`q` [Tq, Hq, D] over `k`, `v` [Tk, Hkv, D] -> result [Tq, Hq, D] and log-sum-exp [Hq, Tq], in fp32 at least.

    With `pieces`, queries and keys are of the same tokens, packed; without, there is no mask. No autograd.
    """
    assert pieces is not None or not causal, "a rectangle has no mask"
    run = BLOCK_ATTENTION.choose(implementation, _variant(pieces, causal), q.device, q.dtype)
    out: tuple[Tensor, Tensor] = run(q, k, v, pieces, causal, scale)
    return out


def block_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    pieces: Pieces,
    causal: bool,
    scale: float,
    implementation: str = AUTO,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v through this block, given the whole result `out` and its `lse` over all keys."""
    run = BLOCK_ATTENTION_BACKWARD.choose(implementation, _variant(pieces, causal), q.device, q.dtype)
    found: tuple[Tensor, Tensor, Tensor] = run(grad, q, k, v, out, lse, pieces, causal, scale)
    return found


def join(out: Tensor, lse: Tensor, rows: slice, other: Tensor, other_lse: Tensor) -> None:
    """Adds to `out` [T, H, D] and `lse` [H, T], in place, what `rows` of it see besides."""
    before = lse[:, rows]
    both = torch.logaddexp(before, other_lse)
    keep, add = ((part - both).exp().t().unsqueeze(-1) for part in (before, other_lse))
    out[rows] = out[rows] * keep + other * add
    lse[:, rows] = both


def wide(x: Tensor) -> Tensor:
    """In fp32 at least: what is added up from several blocks."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _variant(pieces: Pieces, causal: bool) -> str:
    return "rectangle" if pieces is None else "causal" if causal else "full"


# ---------------------------------------------------------------------------------------------- eager: the reference


def _eager(q: Tensor, k: Tensor, v: Tensor, pieces: Pieces, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    outs, sums = [], []
    for at in _slices(pieces):
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
    pieces: Pieces,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    heads, kv_heads = q.shape[1], k.shape[1]
    for at in _slices(pieces):
        weights = (_scores(q[at], k[at], causal, scale) - lse[:, at].unsqueeze(-1)).exp()  # [H, Lq, Lk]
        given = _by_head(grad[at], heads)
        mean = (given * _by_head(out[at], heads)).sum(-1, keepdim=True)
        inner = weights * (given @ _by_head(v[at], heads).transpose(1, 2) - mean) * scale
        dq, dk, dv = (
            inner @ _by_head(k[at], heads),
            inner.transpose(1, 2) @ _by_head(q[at], heads),
            weights.transpose(1, 2) @ given,
        )
        dk, dv = (x.reshape(kv_heads, -1, *x.shape[1:]).sum(1) for x in (dk, dv))
        parts.append((dq, dk, dv))
    dq, dk, dv = (torch.cat(x, 1).transpose(0, 1) for x in zip(*parts, strict=True))
    return dq, dk, dv


def _slices(pieces: Pieces) -> list[slice]:
    if pieces is None:
        return [slice(None)]
    ends = list(accumulate(pieces.lengths)) if pieces.lengths else pieces.bounds[1:].tolist()
    return [slice(a, b) for a, b in zip([0, *ends], ends, strict=False) if b > a]


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    """[H, Lq, Lk], in fp32 at least."""
    scores = _by_head(q, q.shape[1]) @ _by_head(k, q.shape[1]).transpose(1, 2) * scale
    if causal:
        later = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores


def _by_head(x: Tensor, heads: int) -> Tensor:
    """[L, h, D] -> [heads, L, D] in fp32 at least, each head as often as queries share it."""
    return wide(x).transpose(0, 1).repeat_interleave(heads // x.shape[1], dim=0)


# ---------------------------------------------------------------------------------------------- flash: on accelerators

# Not public, but what torch's own `varlen_attn` calls, forward and backward. That one's gradient is of a whole
# attention; here the log-sum-exp and the result it is computed from span more keys than the block has.


def _flash(q: Tensor, k: Tensor, v: Tensor, pieces: Pieces, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    size = q.shape[-1]
    q, k, v = (_padded(x) for x in (q, k, v))
    found = torch.ops.aten._flash_attention_forward(
        q, k, v, *_extents(q, k, pieces), 0.0, causal, return_debug_mask=False, scale=scale
    )
    return found[0][..., :size], found[1]


def _flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    pieces: Pieces,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    size = q.shape[-1]
    grad, q, k, v, out = (_padded(x) for x in (grad, q, k, v, out))
    nothing = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the state of a dropout that there is not
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        grad,
        q,
        k,
        v,
        out,
        lse.contiguous(),
        *_extents(q, k, pieces),
        0.0,
        causal,
        nothing,
        torch.empty(0, device=q.device),
        scale=scale,
    )
    return dq[..., :size], dk[..., :size], dv[..., :size]


def _extents(q: Tensor, k: Tensor, pieces: Pieces) -> tuple[Tensor, Tensor, int, int]:
    """Bounds of queries and of keys, and the longest of each; made on the device, without a copy from the host."""
    if pieces is not None:
        return pieces.bounds, pieces.bounds, pieces.longest, pieces.longest
    both = torch.arange(2, dtype=torch.int32, device=q.device)
    return both * q.shape[0], both * k.shape[0], q.shape[0], k.shape[0]


def _padded(x: Tensor) -> Tensor:
    """The kernel takes head sizes in eights. Zeros at the end change no product."""
    size = x.shape[-1]
    x = F.pad(x, (0, -size % 8)) if size % 8 else x
    return x if x.stride(-1) == 1 else x.contiguous()


_VARIANTS = ("rectangle", "full", "causal")
_FLASH_NEEDS = ("flash_attention",)
_FLASH_TYPES = (torch.bfloat16, torch.float16)

BLOCK_ATTENTION = Operation(
    "block_attention",
    (
        Implementation("flash", _flash, _VARIANTS, needs=_FLASH_NEEDS, dtypes=_FLASH_TYPES),
        Implementation("eager", _eager, _VARIANTS),
    ),
)
BLOCK_ATTENTION_BACKWARD = Operation(
    "block_attention_backward",
    (
        Implementation("flash", _flash_backward, _VARIANTS, needs=_FLASH_NEEDS, dtypes=_FLASH_TYPES),
        Implementation("eager", _eager_backward, _VARIANTS),
    ),
)
