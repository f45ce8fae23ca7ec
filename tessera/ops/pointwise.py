"""Operations on single tokens: RMS and layer normalisation, SwiGLU, and rotary position embeddings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.ops import ascend_kernels
from tessera.ops.fused_pointwise import Rotate, SwiGLU
from tessera.ops.registry import AUTO, DispatchedOp, Implementation
from tessera.runtime import device as devices


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, implementation: str = AUTO) -> Tensor:
    """Return the RMS norm of `x` over its last dimension, with statistics in fp32."""
    run = RMS_NORM.choose(implementation, "plain", x.device, x.dtype)
    return run(x, weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, implementation: str = AUTO) -> Tensor:
    """Return the layer norm of `x` over its last dimension, with statistics in fp32."""
    run = LAYER_NORM.choose(implementation, "plain", x.device, x.dtype)
    return run(x, weight, bias, eps)


def _rms_norm_eager(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def _rms_norm_fused(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if devices.counted_for(x.device) is not None and x.dtype == weight.dtype:
        return _CountedRMSNorm.apply(x, weight)  # type: ignore[no-untyped-call]
    return F.rms_norm(x, weight.shape, weight, eps)


class _CountedRMSNorm(torch.autograd.Function):
    """Keep as much memory as the fused kernel of accelerators, for memory estimates on the CPU.

    On the CPU torch's own rms_norm consists of operations that keep five times as much.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(
            x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.promote_types(x.dtype, torch.float32))
        )
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _layer_norm_eager(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    out = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight.float()
    if bias is not None:
        out = out + bias.float()
    return out.to(x.dtype)


def _layer_norm_fused(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, eps)


RMS_NORM = DispatchedOp(
    "rms_norm",
    (
        Implementation("fused", ascend_kernels.rms_norm, **ascend_kernels.NEEDS),
        Implementation("fused", _rms_norm_fused),
        Implementation("eager", _rms_norm_eager),
    ),
)
LAYER_NORM = DispatchedOp(
    "layer_norm", (Implementation("fused", _layer_norm_fused), Implementation("eager", _layer_norm_eager))
)


def swiglu(gate: Tensor, up: Tensor, *, implementation: str = AUTO) -> Tensor:
    """Return silu(gate) * up."""
    run = SWIGLU.choose(implementation, "plain", gate.device, gate.dtype)
    return run(gate, up)


def _swiglu_eager(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _swiglu_fused(gate: Tensor, up: Tensor) -> Tensor:
    return SwiGLU.apply(gate, up)  # type: ignore[no-untyped-call]


# Triton kernels for uncompiled models; the compiler fuses the eager implementations.
_FUSED: dict[str, Any] = {
    "needs": ("triton",),
    "dtypes": (torch.bfloat16, torch.float16, torch.float32),
    "traced": False,
}

SWIGLU = DispatchedOp(
    "swiglu",
    (
        Implementation("fused", _swiglu_fused, **_FUSED),
        Implementation("fused", ascend_kernels.swiglu, **ascend_kernels.NEEDS),
        Implementation("eager", _swiglu_eager),
    ),
)


@dataclass(frozen=True)
class Angles:
    """Hold cosine and sine of every position, [T, D / 2] in fp32.

    They are computed once per forward pass and shared by all layers. They are not buffers, so a model on the meta
    device has only parameters to fill. This is a dataclass and not a tuple, because mixed-precision wrappers cast
    tensors inside tuples to bf16, and these must stay fp32.
    """

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class FrequencyScaling:
    """Divide low frequencies by `factor`, keep high ones, and interpolate between (llama3 scaling).

    A frequency is low with fewer than `low` rotations within the `original` context length, and high with more than
    `high`.
    """

    factor: float
    low: float
    high: float
    original: int
    attention: ClassVar[float] = 1.0

    def apply(self, frequencies: Tensor, rope: Rope) -> Tensor:
        rotations = self.original * frequencies / (2 * math.pi)
        unscaled = ((rotations - self.low) / (self.high - self.low)).clamp(0, 1)
        return frequencies * (unscaled + (1 - unscaled) / self.factor)


@dataclass(frozen=True)
class LinearScaling:
    """Divide all frequencies by `factor`."""

    factor: float
    attention: ClassVar[float] = 1.0

    def apply(self, frequencies: Tensor, rope: Rope) -> Tensor:
        return frequencies / self.factor


@dataclass(frozen=True)
class YarnScaling:
    """Scale frequencies as YaRN does.

    Unlike `FrequencyScaling` it interpolates by the index of the frequency, between `slow` and `fast` rotations, and
    multiplies queries and keys by the factor `attention`. `whole`: interpolation starts and ends at rounded indices.
    """

    factor: float
    fast: float
    slow: float
    original: int
    attention: float
    whole: bool

    def apply(self, frequencies: Tensor, rope: Rope) -> Tensor:
        first, last = (self._index(rotations, rope) for rotations in (self.fast, self.slow))
        if self.whole:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, rope.dim - 1)
        index = torch.arange(rope.dim // 2, device=frequencies.device, dtype=torch.float32)
        scaled = ((index - first) / (last - first or 0.001)).clamp(0, 1)
        return frequencies / self.factor * scaled + frequencies * (1 - scaled)

    def _index(self, rotations: float, rope: Rope) -> float:
        """Return the (fractional) index of the frequency with this number of rotations."""
        return rope.dim * math.log(self.original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))


def yarn_attention(factor: float, scale: float | None = None, scale_all: float | None = None) -> float:
    """Return the default of `YarnScaling.attention`."""

    def mscale(by: float) -> float:
        return 0.1 * by * math.log(factor) + 1.0 if factor > 1 else 1.0

    return mscale(scale) / mscale(scale_all) if scale and scale_all else mscale(1.0)


Scaling = FrequencyScaling | LinearScaling | YarnScaling


@dataclass(frozen=True)
class Rope:
    """Describe rotary position embeddings along one axis, or along time, height and width."""

    dim: int  # number of rotated dimensions, the first ones of each head
    theta: float
    sections: tuple[int, ...] = ()  # numbers of frequencies for time, height and width; empty: one axis
    interleaved: bool = False  # frequencies of the three axes alternate instead of being consecutive
    scaling: Scaling | None = None

    def angles(self, positions: Tensor) -> Angles:
        """Return angles for `positions`: [3, T] for time, height and width, or [T] for one axis or three equal ones."""
        angles = self._angles(positions, self.frequencies(positions.device))
        factor = 1.0 if self.scaling is None else self.scaling.attention
        if factor == 1.0:
            return _angles(angles)
        return Angles(angles.cos() * factor, angles.sin() * factor)

    def frequencies(self, device: torch.device) -> Tensor:
        """Return the frequencies [D / 2], in radians per position."""
        plain = _frequencies(self.dim, self.theta, device)
        return plain if self.scaling is None else self.scaling.apply(plain, self)

    def _angles(self, positions: Tensor, frequencies: Tensor) -> Tensor:
        if positions.dim() == 1:
            return positions.float().unsqueeze(-1) * frequencies
        wide = positions.float().unsqueeze(-1)
        if not self.interleaved:
            parts = [wide[axis % 3] * part for axis, part in enumerate(torch.split(frequencies, list(self.sections)))]
            return torch.cat(parts, dim=-1)
        index = torch.arange(self.dim // 2, device=positions.device)
        angles = wide[0] * frequencies
        for axis in (1, 2):
            of_axis = (index % 3 == axis) & (index < 3 * self.sections[axis])
            angles = torch.where(of_axis, wide[axis] * frequencies, angles)
        return angles


def axial_angles(positions: Tensor, dim: int, theta: float) -> Angles:
    """Return angles for `positions` [T, 2]. The first half of the frequencies is for height, the second for width."""
    angles = positions.float().unsqueeze(-1) * _frequencies(dim // 2, theta, positions.device)  # [T, 2, dim / 4]
    return _angles(angles.flatten(1))


def axes_angles(positions: Tensor, sizes: Sequence[int], theta: float) -> Angles:
    """Return angles for `positions` [A, T]. Axis a rotates `sizes[a]` dimensions of a head, with its own frequencies.

    Products are computed in fp64, as in diffusers, or in fp32 on Ascend devices.
    """
    wide = positions.to(devices.sum_dtype(positions.device)).unsqueeze(-1)
    parts = [at * _frequencies(size, theta, at.device, at.dtype) for at, size in zip(wide, sizes, strict=True)]
    angles = torch.cat(parts, dim=-1)
    return Angles(angles.cos().float(), angles.sin().float())


def rotate(x: Tensor, angles: Angles, *, pairs: bool = False, implementation: str = AUTO) -> Tensor:
    """Return `x` [T, H, D] rotated by the angles of its positions.

    An angle rotates two dimensions: one of each half of the rotated ones or, with `pairs`, two adjacent ones. With
    fewer than D / 2 angles, only the first dimensions of each head are rotated.
    """
    run = ROTATE.choose(implementation, "pairs" if pairs else "plain", x.device, x.dtype)
    return run(x, angles)


def _frequencies(dim: int, theta: float, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    exponents = torch.arange(0, dim, 2, device=device, dtype=dtype) / dim
    return 1.0 / (theta**exponents)


def _angles(angles: Tensor) -> Angles:
    return Angles(angles.cos(), angles.sin())


def _rotate_eager(x: Tensor, angles: Angles) -> Tensor:
    rotated = 2 * angles.cos.shape[-1]
    first, second = x[..., :rotated].float().chunk(2, dim=-1)
    return _with_rest(torch.cat(_turned(first, second, angles), dim=-1).to(x.dtype), x)


def _rotate_pairs_eager(x: Tensor, angles: Angles) -> Tensor:
    rotated = 2 * angles.cos.shape[-1]
    first, second = x[..., :rotated].float().reshape(*x.shape[:-1], rotated // 2, 2).unbind(-1)
    return _with_rest(torch.stack(_turned(first, second, angles), dim=-1).flatten(-2).to(x.dtype), x)


def _turned(first: Tensor, second: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
    cos, sin = angles.cos.unsqueeze(1), angles.sin.unsqueeze(1)
    return first * cos - second * sin, second * cos + first * sin


def _with_rest(turned: Tensor, x: Tensor) -> Tensor:
    rest = x[..., turned.shape[-1] :]
    return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned


def _rotate_ascend(x: Tensor, angles: Angles, pairs: bool) -> Tensor:
    return ascend_kernels.rotate(x, angles.cos, angles.sin, pairs)


def _rotate_fused(x: Tensor, angles: Angles, pairs: bool) -> Tensor:
    return Rotate.apply(x, angles.cos, angles.sin, pairs)  # type: ignore[no-untyped-call]


ROTATE = DispatchedOp(
    "rotate",
    (
        Implementation("fused", partial(_rotate_fused, pairs=False), **_FUSED),
        Implementation("fused", partial(_rotate_fused, pairs=True), ("pairs",), **_FUSED),
        Implementation("fused", partial(_rotate_ascend, pairs=False), **ascend_kernels.NEEDS),
        Implementation("fused", partial(_rotate_ascend, pairs=True), ("pairs",), **ascend_kernels.NEEDS),
        Implementation("eager", _rotate_eager),
        Implementation("eager", _rotate_pairs_eager, ("pairs",)),
    ),
)
