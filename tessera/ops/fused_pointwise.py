"""SwiGLU and rotary position embeddings with one kernel per pass, for models that are not compiled.

The compiler fuses the eager implementations. Without a compiler, a rotation in eager torch reads and writes its input
about six times, and SwiGLU keeps a third tensor for the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tessera.runtime import device as devices


class SwiGLU(torch.autograd.Function):
    """Compute silu(gate) * up in fp32, and keep only gate and up for the backward pass."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        if _has_values(gate):
            from tessera.ops.pointwise_kernels import launch_swiglu

            launch_swiglu(gate, up, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
        if _has_values(gate):
            from tessera.ops.pointwise_kernels import launch_swiglu_backward

            launch_swiglu_backward(grad.contiguous(), gate, up, of_gate, of_up)
        return of_gate, of_up


class Rotate(torch.autograd.Function):
    """Rotate the first R dimensions of each head of `x` [T, H, D] by angles [T, R / 2]; copy the others."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, pairs: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.pairs = pairs
        return _rotated(x, cos, sin, pairs, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, sin, ctx.pairs, -1.0), None, None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, pairs: bool, sign: float) -> Tensor:
    """Return `x` rotated by the angles times `sign`: the gradient of a rotation is the inverse rotation."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if _has_values(x):
        from tessera.ops.pointwise_kernels import launch_rotate

        launch_rotate(x, cos.contiguous(), sin.contiguous(), out, pairs, sign)
    return out


def _has_values(x: Tensor) -> bool:
    """Return whether a kernel can read the tensor. It is False for empty tensors and for fake tensors of a dry run."""
    return x.numel() > 0 and not devices.supports(x.device, "no_values")
