"""Triton kernels of SwiGLU and of rotary position embeddings."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024  # tensor elements per thread block of SwiGLU
_TILE = 4096  # maximum number of rotated pairs of elements per thread block, but at least one head


def launch_swiglu(gate: Tensor, up: Tensor, out: Tensor) -> None:
    swiglu_kernel[(triton.cdiv(gate.numel(), _BLOCK),)](gate, up, out, gate.numel(), BLOCK=_BLOCK)


def launch_swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor, of_gate: Tensor, of_up: Tensor) -> None:
    blocks = triton.cdiv(gate.numel(), _BLOCK)
    swiglu_backward_kernel[(blocks,)](grad, gate, up, of_gate, of_up, gate.numel(), BLOCK=_BLOCK)


def launch_rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, pairs: bool, sign: float) -> None:
    tokens, heads, size = x.shape
    half = cos.shape[-1]
    width = triton.next_power_of_2(half)
    block = max(1, min(triton.next_power_of_2(heads), _TILE // width))
    rope_kernel[(tokens, triton.cdiv(heads, block))](
        *(x, cos, sin, out, heads, x.stride(0), x.stride(1), half if cos.shape[0] == tokens else 0, sign),
        SIZE=size,
        HALF=half,
        PAIRS=pairs,
        HEADS=block,
        WIDTH=width,
        REST=triton.next_power_of_2(size - 2 * half) if size > 2 * half else 0,
    )


# ---------------------------------------------------------------------------------------------- kernels

# The profiler classifies kernels by name. An argument `x_at` is a pointer to the tensor `x`.


@triton.jit
def swiglu_kernel(gate_at, up_at, out_at, numel, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    gate = tl.load(gate_at + at, inside, 0.0).to(tl.float32)
    up = tl.load(up_at + at, inside, 0.0).to(tl.float32)
    tl.store(out_at + at, (gate * tl.sigmoid(gate) * up).to(out_at.dtype.element_ty), inside)


@triton.jit
def swiglu_backward_kernel(grad_at, gate_at, up_at, of_gate_at, of_up_at, numel, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    grad = tl.load(grad_at + at, inside, 0.0).to(tl.float32)
    gate = tl.load(gate_at + at, inside, 0.0).to(tl.float32)
    up = tl.load(up_at + at, inside, 0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    of_gate = grad * up * (sigmoid + silu * (1 - sigmoid))
    tl.store(of_gate_at + at, of_gate.to(of_gate_at.dtype.element_ty), inside)
    tl.store(of_up_at + at, (grad * silu).to(of_up_at.dtype.element_ty), inside)


@triton.jit
def rope_kernel(
    x_at,
    cos_at,
    sin_at,
    out_at,
    heads,
    x_token,
    x_head,
    angles_token,
    sign,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    REST: tl.constexpr,
):
    """Rotate some heads of a token. REST: number of unrotated dimensions, rounded up to a power of two, or 0."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    angle = tl.arange(0, WIDTH)
    cos = tl.load(cos_at + token * angles_token + angle, angle < HALF, 0.0)[None, :]
    sin = tl.load(sin_at + token * angles_token + angle, angle < HALF, 0.0)[None, :] * sign
    x_row = x_at + token * x_token + head * x_head
    out_row = out_at + (token * heads + head) * SIZE
    if PAIRS:  # read full rows and split pairs in registers
        column = tl.arange(0, 2 * WIDTH)[None, :]
        inside = (head < heads) & (column < 2 * HALF)
        both = tl.load(x_row + column, inside, 0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(both, (HEADS, WIDTH, 2)))
        turned = tl.join(first * cos - second * sin, second * cos + first * sin)
        turned = tl.reshape(turned, (HEADS, 2 * WIDTH))
        tl.store(out_row + column, turned.to(out_at.dtype.element_ty), inside)
    else:
        column = angle[None, :]
        inside = (head < heads) & (column < HALF)
        first = tl.load(x_row + column, inside, 0.0).to(tl.float32)
        second = tl.load(x_row + HALF + column, inside, 0.0).to(tl.float32)
        tl.store(out_row + column, (first * cos - second * sin).to(out_at.dtype.element_ty), inside)
        tl.store(out_row + HALF + column, (second * cos + first * sin).to(out_at.dtype.element_ty), inside)
    if REST > 0:
        rest = 2 * HALF + tl.arange(0, REST)[None, :]
        copied = (head < heads) & (rest < SIZE)
        tl.store(out_row + rest, tl.load(x_row + rest, copied), copied)
