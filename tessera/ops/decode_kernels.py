"""Triton kernels of a decoder layer that computes one new token per row.

At few rows a layer reads its weights in 25 microseconds, and each kernel costs two more. So each of these kernels
does what the modules of a layer do in two to six kernels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class LinearLaunch(NamedTuple):
    """Hold launch settings of `vector_linear_kernel`."""

    outputs: int  # rows of the weight that a thread block reads
    inputs: int  # elements of each row that it reads at once
    warps: int
    stages: int  # number of iterations whose loads are in flight at once


# The fastest launch on an H200 for each kind of product, of those that `bench/decode_kernels.py` compares.
LAUNCHES = {
    "gate": LinearLaunch(4, 1024, 4, 1),  # the gate and up projections in one product
    "wide": LinearLaunch(2, 1024, 4, 1),  # products with more than 4,096 inputs, such as the down projection
    "small": LinearLaunch(2, 1024, 4, 1),  # all other products, such as the projections of attention
}


def launch_of(inputs: int, gate: bool) -> LinearLaunch:
    return LAUNCHES["gate" if gate else "wide" if inputs > 4096 else "small"]


def add_norm(x: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return `x` + `update` [R, H] and its RMS norm."""
    rows, hidden = x.shape
    out = torch.empty_like(x)
    total = x if update is None else torch.empty_like(x)
    add_norm_kernel[(rows,)](
        *(x, x if update is None else update, weight, total, out, hidden, eps),
        ADD=update is not None,
        WIDTH=triton.next_power_of_2(hidden),
        num_warps=8 if hidden > 1024 else 4,
    )
    return total, out


def rotate_and_store(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
) -> Tensor:
    """Return the rotated queries [R, Hq, D] of `qkv` [R, (Hq + 2 Hkv) D]; store rotated keys, and values, in `slots`.

    `norms`: weights of the RMS norms of queries and of keys before rotation. `cos`, `sin`: [R, at most D / 2].
    """
    rows, kv_heads, size = qkv.shape[0], *keys.shape[2:]
    heads = qkv.shape[1] // size - 2 * kv_heads
    half = cos.shape[-1]
    assert all(tensor.is_contiguous() for tensor in (qkv, keys, values))
    q = torch.empty(rows, heads, size, dtype=qkv.dtype, device=qkv.device)
    of_q, of_k = norms or (qkv, qkv)
    rotate_and_store_kernel[(rows, heads + 2 * kv_heads)](
        *(qkv, of_q, of_k, cos.contiguous(), sin.contiguous(), q, keys, values, slots, heads, kv_heads, eps),
        SIZE=size,
        HALF=half,
        NORMED=norms is not None,
        WIDTH=triton.next_power_of_2(half),
        REST=triton.next_power_of_2(size - 2 * half) if size > 2 * half else 0,
        num_warps=1,
    )
    return q


def gated(both: Tensor) -> Tensor:
    """Return silu(gate) * up of `both` [R, 2 I]: gate, then up."""
    rows, inner = both.shape[0], both.shape[1] // 2
    out = torch.empty(rows, inner, dtype=both.dtype, device=both.device)
    gated_kernel[(rows, triton.cdiv(inner, 1024))](both, out, inner, BLOCK=1024)
    return out


def vector_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    gate: bool = False,
    launch: LinearLaunch | None = None,
) -> Tensor:
    """Return the linear map [1, N] of `x` [1, K] by `weight` [N, K], plus `bias` and `residual` [1, N].

    `norm`: weight and epsilon of an RMS norm that is applied to `x` first. `gate`: `weight` [2 N, K] contains the rows
    of the gate, then those of up, and the output is silu(gate) * up.
    """
    assert x.shape[0] == 1
    assert all(tensor.is_contiguous() for tensor in (x, weight))
    outputs = weight.shape[0] // 2 if gate else weight.shape[0]
    out = torch.empty(1, outputs, dtype=x.dtype, device=x.device)
    scale, eps = norm or (x, 0.0)
    launch = launch or launch_of(x.shape[1], gate)
    vector_linear_kernel[(triton.cdiv(outputs, launch.outputs),)](
        *(x, scale, weight, x if bias is None else bias, x if residual is None else residual, out),
        *(outputs, x.shape[1], eps),
        NORMED=norm is not None,
        BIASED=bias is not None,
        ADDED=residual is not None,
        GATED=gate,
        ROWS=launch.outputs,
        BLOCK=min(launch.inputs, triton.next_power_of_2(x.shape[1])),
        STAGES=launch.stages,
        num_warps=launch.warps,
    )
    return out


# ---------------------------------------------------------------------------------------------- kernels

# The profiler classifies kernels by name. An argument `x_at` is a pointer to the tensor `x`.


@triton.jit
def add_norm_kernel(x_at, update_at, weight_at, total_at, out_at, hidden, eps, ADD: tl.constexpr, WIDTH: tl.constexpr):
    column = tl.arange(0, WIDTH)
    inside = column < hidden
    at = tl.program_id(0).to(tl.int64) * hidden + column
    x = tl.load(x_at + at, inside, 0.0)
    if ADD:
        # Round the sum as torch does, so that the norm is that of the stored sum.
        x = (x.to(tl.float32) + tl.load(update_at + at, inside, 0.0).to(tl.float32)).to(total_at.dtype.element_ty)
        tl.store(total_at + at, x, inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / hidden + eps)
    normed = wide * scale * tl.load(weight_at + column, inside, 0.0).to(tl.float32)
    tl.store(out_at + at, normed.to(out_at.dtype.element_ty), inside)


@triton.jit
def rotate_and_store_kernel(
    qkv_at,
    q_norm_at,
    k_norm_at,
    cos_at,
    sin_at,
    q_at,
    keys_at,
    values_at,
    slots_at,
    heads,
    kv_heads,
    eps,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    NORMED: tl.constexpr,
    WIDTH: tl.constexpr,
    REST: tl.constexpr,
):
    """Compute one head of a row.

    WIDTH: HALF rounded up to a power of two. REST: the same for the number of unrotated dimensions (may be 0).
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots_at + row)
    source = qkv_at + (row * (heads + 2 * kv_heads) + head) * SIZE
    column = tl.arange(0, WIDTH)
    inside = column < HALF
    first = tl.load(source + column, inside, 0.0)
    second = tl.load(source + HALF + column, inside, 0.0)
    if head < heads + kv_heads:
        target = q_at + (row * heads + head) * SIZE
        norm_at = q_norm_at
        if head >= heads:
            target = keys_at + (slot * kv_heads + head - heads) * SIZE
            norm_at = k_norm_at
        a, b = first.to(tl.float32), second.to(tl.float32)
        scale = 1.0
        if NORMED:
            squares = tl.sum(a * a, 0) + tl.sum(b * b, 0)
            if REST > 0:
                rest = 2 * HALF + tl.arange(0, REST)
                wide = tl.load(source + rest, rest < SIZE, 0.0).to(tl.float32)
                squares += tl.sum(wide * wide, 0)
            scale = tl.rsqrt(squares / SIZE + eps)
            a = a * scale * tl.load(norm_at + column, inside, 0.0).to(tl.float32)
            b = b * scale * tl.load(norm_at + HALF + column, inside, 0.0).to(tl.float32)
            # Round as the separate operations do.
            a, b = a.to(first.dtype).to(tl.float32), b.to(first.dtype).to(tl.float32)
        cos = tl.load(cos_at + row * HALF + column, inside, 0.0)
        sin = tl.load(sin_at + row * HALF + column, inside, 0.0)
        tl.store(target + column, (a * cos - b * sin).to(first.dtype), inside)
        tl.store(target + HALF + column, (b * cos + a * sin).to(first.dtype), inside)
        if REST > 0:
            rest = 2 * HALF + tl.arange(0, REST)
            end = tl.load(source + rest, rest < SIZE, 0.0)
            if NORMED:
                end = (end.to(tl.float32) * scale * tl.load(norm_at + rest, rest < SIZE, 0.0).to(tl.float32)).to(
                    first.dtype
                )
            tl.store(target + rest, end, rest < SIZE)
    else:
        target = values_at + (slot * kv_heads + head - heads - kv_heads) * SIZE
        tl.store(target + column, first, inside)
        tl.store(target + HALF + column, second, inside)
        if REST > 0:
            rest = 2 * HALF + tl.arange(0, REST)
            tl.store(target + rest, tl.load(source + rest, rest < SIZE, 0.0), rest < SIZE)


@triton.jit
def gated_kernel(both_at, out_at, inner, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    gate = tl.load(both_at + row * 2 * inner + column, inside, 0.0).to(tl.float32)
    up = tl.load(both_at + (row * 2 + 1) * inner + column, inside, 0.0).to(tl.float32)
    tl.store(out_at + row * inner + column, (gate * tl.sigmoid(gate) * up).to(out_at.dtype.element_ty), inside)


@triton.jit
def vector_linear_kernel(
    x_at,
    norm_at,
    weight_at,
    bias_at,
    residual_at,
    out_at,
    outputs,
    inputs,
    eps,
    NORMED: tl.constexpr,
    BIASED: tl.constexpr,
    ADDED: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute ROWS outputs. The norm's factor 1 / rms is applied at the end, so nothing waits for it."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < outputs
    start = weight_at + row.to(tl.int64)[:, None] * inputs
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    raised = tl.zeros((ROWS, BLOCK), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    for at in tl.range(0, inputs, BLOCK, num_stages=STAGES):
        column = at + tl.arange(0, BLOCK)
        inside = column < inputs
        there = real[:, None] & inside[None, :]
        # No other thread block reads these weights, so they are evicted first and the cache keeps x.
        weight = tl.load(start + column[None, :], there, 0.0, eviction_policy="evict_first")
        if GATED:
            above = start + outputs.to(tl.int64) * inputs
            up = tl.load(above + column[None, :], there, 0.0, eviction_policy="evict_first")
        x = tl.load(x_at + column, inside, 0.0).to(tl.float32)
        if NORMED:
            squares += x * x
            x = x * tl.load(norm_at + column, inside, 0.0).to(tl.float32)
        sums += weight.to(tl.float32) * x[None, :]
        if GATED:
            raised += up.to(tl.float32) * x[None, :]
    out = tl.sum(sums, 1)
    if GATED:
        other = tl.sum(raised, 1)
    if NORMED:
        scale = tl.rsqrt(tl.sum(squares, 0) / inputs + eps)
        out = out * scale
        if GATED:
            other = other * scale
    if GATED:
        out = out * tl.sigmoid(out) * other
    if BIASED:
        out += tl.load(bias_at + row, real, 0.0).to(tl.float32)
    if ADDED:
        out += tl.load(residual_at + row, real, 0.0).to(tl.float32)
    tl.store(out_at + row, out.to(out_at.dtype.element_ty), real)
