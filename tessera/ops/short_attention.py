"""Attention inside short segments, such as windows of images or the codebooks of a frame of speech, in Triton.

One thread block computes one segment of one head in its registers; backward, of all query heads that share a key-value
head. Kernels for long sequences use tiles of twice the size of such a window and sum gradients in memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def short_attention(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return attention [T, Hq, D] and log-sum-exp [Hq, T] of `q` [T, Hq, D] and `k`, `v` [T, Hkv, D]. No autograd.

    Segments have at most `longest` tokens.
    """
    tokens, heads, size = q.shape
    q, k, v = (_dense_inside(x) for x in (q, k, v))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(heads, tokens, dtype=torch.float32, device=q.device)
    short_attention_kernel[(bounds.numel() - 1, heads)](
        *(q, k, v, out, lse, bounds),
        *(q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1)),
        *(tokens, heads, size, scale),
        CAUSAL=causal,
        GROUP=heads // k.shape[1],
        LENGTH=_tile(longest),
        WIDTH=_tile(size),
        num_warps=4,
    )
    return out, lse


def short_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bounds: Tensor,
    longest: int,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, heads, size = q.shape
    grad, q, k, v, out = (_dense_inside(x) for x in (grad, q, k, v, out))
    dq, dk, dv = (torch.empty(x.shape, dtype=q.dtype, device=q.device) for x in (q, k, k))
    short_attention_backward_kernel[(bounds.numel() - 1, k.shape[1])](
        *(grad, q, k, v, out.contiguous(), lse, bounds, dq, dk, dv),
        *(grad.stride(0), grad.stride(1), q.stride(0), q.stride(1)),
        *(k.stride(0), k.stride(1), v.stride(0), v.stride(1)),
        *(tokens, heads, size, scale),
        CAUSAL=causal,
        GROUP=heads // k.shape[1],
        LENGTH=_tile(longest),
        WIDTH=_tile(size),
        num_warps=4,
    )
    return dq, dk, dv


def _dense_inside(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _tile(size: int) -> int:
    """Return the side of a tile: a power of two of at least 16, as tensor cores need."""
    return max(16, 1 << (size - 1).bit_length())


# ---------------------------------------------------------------------------------------------- kernels

# The profiler classifies kernels by name.


@triton.jit
def _read(at, token, stride, column, there):
    return tl.load(at + token[:, None] * stride + column[None, :], there, 0.0)


@triton.jit
def _scores(q, k, row, real, scale, CAUSAL: tl.constexpr):
    visible = real[None, :] & (row[:, None] >= (row[None, :] if CAUSAL else 0))
    return tl.where(visible, tl.dot(q, tl.trans(k)) * scale, float("-inf"))


@triton.jit
def short_attention_kernel(
    q_at,
    k_at,
    v_at,
    out_at,
    lse_at,
    bounds_at,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    tokens,
    heads,
    size,
    scale,
    CAUSAL: tl.constexpr,
    GROUP: tl.constexpr,
    LENGTH: tl.constexpr,
    WIDTH: tl.constexpr,
):
    segment, head = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(bounds_at + segment), tl.load(bounds_at + segment + 1)
    row, column = tl.arange(0, LENGTH), tl.arange(0, WIDTH)
    token = (start + row).to(tl.int64)
    real = token < end
    there = real[:, None] & (column < size)[None, :]
    q = _read(q_at + head * q_head, token, q_token, column, there)
    k = _read(k_at + head // GROUP * k_head, token, k_token, column, there)
    v = _read(v_at + head // GROUP * v_head, token, v_token, column, there)
    scores = _scores(q, k, row, real, scale, CAUSAL)
    highest = tl.max(scores, 1)
    highest = tl.where(highest == float("-inf"), 0.0, highest)  # rows beyond the segment have no keys
    weights = tl.exp(scores - highest[:, None])
    total = tl.sum(weights, 1)
    total = tl.where(total == 0.0, 1.0, total)
    out = tl.dot((weights / total[:, None]).to(v.dtype), v)
    tl.store(out_at + (token[:, None] * heads + head) * size + column[None, :], out.to(v.dtype), there)
    tl.store(lse_at + head * tokens + token, highest + tl.log(total), real)


@triton.jit
def short_attention_backward_kernel(
    grad_at,
    q_at,
    k_at,
    v_at,
    out_at,
    lse_at,
    bounds_at,
    dq_at,
    dk_at,
    dv_at,
    grad_token,
    grad_head,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    tokens,
    heads,
    size,
    scale,
    CAUSAL: tl.constexpr,
    GROUP: tl.constexpr,
    LENGTH: tl.constexpr,
    WIDTH: tl.constexpr,
):
    segment, group = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(bounds_at + segment), tl.load(bounds_at + segment + 1)
    row, column = tl.arange(0, LENGTH), tl.arange(0, WIDTH)
    token = (start + row).to(tl.int64)
    real = token < end
    there = real[:, None] & (column < size)[None, :]
    key_at = (token[:, None] * (heads // GROUP) + group) * size + column[None, :]
    k = _read(k_at + group * k_head, token, k_token, column, there)
    v = _read(v_at + group * v_head, token, v_token, column, there)
    if GROUP > 1:
        dk, dv = tl.zeros((LENGTH, WIDTH), tl.float32), tl.zeros((LENGTH, WIDTH), tl.float32)
    for number in tl.static_range(GROUP):
        head = group * GROUP + number
        at = (token[:, None] * heads + head) * size + column[None, :]
        q = _read(q_at + head * q_head, token, q_token, column, there)
        lse = tl.load(lse_at + head * tokens + token, real, 0.0)
        scores = _scores(q, k, row, real, scale, CAUSAL)
        # Rows beyond the segment also have weights, but zero gradients.
        weights = tl.exp(scores - lse[:, None])
        grad = _read(grad_at + head * grad_head, token, grad_token, column, there)
        of_value = tl.dot(tl.trans(weights.to(grad.dtype)), grad)
        if GROUP == 1:  # stored at once, which keeps registers free
            tl.store(dv_at + key_at, of_value.to(grad.dtype), there)
        else:
            dv += of_value
        out = tl.load(out_at + at, there, 0.0)
        mean = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
        inner = (weights * (tl.dot(grad, tl.trans(v)) - mean[:, None]) * scale).to(q.dtype)
        tl.store(dq_at + at, tl.dot(inner, k).to(q.dtype), there)
        of_key = tl.dot(tl.trans(inner), q)
        if GROUP == 1:
            tl.store(dk_at + key_at, of_key.to(q.dtype), there)
        else:
            dk += of_key
    if GROUP > 1:
        tl.store(dk_at + key_at, dk.to(k.dtype), there)
        tl.store(dv_at + key_at, dv.to(v.dtype), there)
