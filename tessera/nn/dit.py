"""Blocks of diffusion transformers: time embeddings, modulation by sample, attention to latents and to text.

A packed sequence contains tokens of several samples. Values that depend on the sample (modulation by its timestep) have
one row per sample, and `spread` selects the row of each token. A single row is broadcast.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.core.batch import Batch, Segments
from tessera.nn.layers import PackedAttention
from tessera.nn.vit import gelu_tanh
from tessera.ops.cross_attention import packed_cross_attention
from tessera.ops.pointwise import Angles, rms_norm, rotate
from tessera.ops.registry import AUTO
from tessera.runtime.modules import FeatureStatistics, local_shard

# ---------------------------------------------------------------------------------------------- time


def timestep_features(timesteps: Tensor, size: int) -> Tensor:
    """Return cosines and sines [S, size] of `timesteps` [S] in fp32, at frequencies from 1 to about 1 / 10000."""
    half = size // 2
    # Same order of operations as the published code: at times of about 1000, rounding changes the angles.
    exponents = -math.log(10_000) * torch.arange(half, device=timesteps.device, dtype=torch.float32) / half
    angles = timesteps.float().unsqueeze(-1) * torch.exp(exponents)
    return F.pad(torch.cat([angles.cos(), angles.sin()], dim=-1), (0, size % 2))


class FeedForward(nn.Module):
    """Compute two linear layers with an activation between them."""

    def __init__(
        self,
        size: int,
        inner: int,
        out: int | None = None,
        activation: Callable[[Tensor], Tensor] = gelu_tanh,
    ) -> None:
        super().__init__()
        self.up = nn.Linear(size, inner)
        self.down = nn.Linear(inner, size if out is None else out)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


class TimeEmbedding(FeedForward):
    """Embed timesteps [S]. The result has the dtype of the weights."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__(features, hidden, hidden, F.silu)
        self.features = features

    def forward(self, timesteps: Tensor) -> Tensor:
        return super().forward(timestep_features(timesteps, self.features).to(self.up.weight.dtype))


def time_index(batch: Batch) -> Tensor | None:
    """Return the index into `timesteps` of each token of the main sequence.

    It is the index of the token's sample, unless the batch has a `time_index` (several timesteps within a sample).
    None: `timesteps` has one value per token.
    """
    index = batch.get("time_index")
    if index is not None:
        return index
    samples = batch["sample_index"]
    return None if 1 < batch["timesteps"].shape[0] == samples.shape[0] else samples


# ---------------------------------------------------------------------------------------------- modulation


class _Spread(torch.autograd.Function):
    """Compute `values[index]`. The backward pass is a matrix product, because a scatter-add is not deterministic."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.entries = values.shape[0]
        return values.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        entries = torch.arange(ctx.entries, device=index.device)
        chosen = (entries.unsqueeze(1) == index).to(grads[0].dtype)  # [S, T]
        return chosen @ grads[0], None


def spread(values: Tensor, index: Tensor | None) -> Tensor:
    """Return `values` [S, D] as [T, D] by `index` [T]. A single row stays [1, D] and is broadcast.

    `index` None: `values` already has a row for each token.
    """
    if values.shape[0] == 1 or index is None:
        return values
    return _Spread.apply(values, index)  # type: ignore[no-untyped-call]


class Modulation(nn.Module):
    """Add a learned table of `count` vectors to the modulation that depends on the timestep. The sum is fp32."""

    def __init__(self, count: int, hidden: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(count, hidden))

    def forward(self, values: Tensor, index: Tensor | None) -> tuple[Tensor, ...]:
        """Return `count` tensors [T, D] with a vector for each token ([1, D]: the same vector for all tokens).

        `values` [S, count, D] or [S, 1, D]: modulation of S timesteps. `index` [T]: row of `values` for each token;
        None: `values` has a row for each token.
        """
        return tuple(spread(part, index) for part in (self.table.float() + values.float()).unbind(1))


def modulated_norm(x: Tensor, shift: Tensor, scale: Tensor, eps: float = 1e-6) -> Tensor:
    """Return layer_norm(`x`) * (1 + scale) + shift, computed in the dtype of scale and shift."""
    normed = F.layer_norm(x.to(scale.dtype), x.shape[-1:], eps=eps)
    return (normed * (1 + scale) + shift).to(x.dtype)


def gated_sum(x: Tensor, update: Tensor, gate: Tensor) -> Tensor:
    """Return `x` + update * gate in the dtype of `x`, computed in the widest dtype of the three."""
    return (x + update * gate).to(x.dtype)


class WideLayerNorm(nn.LayerNorm):
    """Compute a layer norm in fp32 and return it in the dtype of the input."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.float(), self.bias.float()
        return F.layer_norm(x.float(), self.normalized_shape, weight, bias, self.eps).to(x.dtype)


# ---------------------------------------------------------------------------------------------- attention


class FeatureRMSNorm(FeatureStatistics):
    """Compute the RMS norm of a token over all heads. Under tensor parallelism the ranks add their statistics."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps
        self.feature_total = None

    def forward(self, x: Tensor) -> Tensor:
        if self.feature_total is None:
            return rms_norm(x, self.weight, self.eps)
        wide = x.float()
        mean = self.feature_total(wide.square().sum(-1, keepdim=True)) / self.weight.shape[0]
        return (wide * torch.rsqrt(mean + self.eps)).to(x.dtype) * local_shard(self.weight)


def by_head(x: Tensor, norm: Callable[[Tensor], Tensor] | None, head_dim: int) -> Tensor:
    """Return `x` [T, H * D] as [T, H, D], normalised. H follows from the width, because a rank may have some of the
    heads."""
    if isinstance(norm, FeatureRMSNorm):
        x = norm(x)
    # explicit sizes, because -1 is ambiguous for zero tokens
    heads = x.view(*x.shape[:-1], x.shape[-1] // head_dim, head_dim)
    return heads if norm is None or isinstance(norm, FeatureRMSNorm) else norm(heads)


class Projections(nn.Module):
    """Apply several linear layers to one input, which tensor parallelism then gathers only once."""

    def __init__(self, size: int, **outputs: int) -> None:
        super().__init__()
        for name, out in outputs.items():
            self.add_module(name, nn.Linear(size, out))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(layer(x) for layer in self.children())


class PackedSelfAttention(nn.Module):
    """Attend within each sample, without a mask. Rotations act on adjacent dimensions of queries and keys."""

    q_norm: nn.Module
    k_norm: nn.Module

    def __init__(self, size: int, heads: int, head_dim: int, eps: float = 1e-6, attention: str = AUTO) -> None:
        super().__init__()
        self.head_dim, inner = head_dim, heads * head_dim
        self.qkv = Projections(size, q=inner, k=inner, v=inner)
        self.q_norm, self.k_norm = FeatureRMSNorm(inner, eps), FeatureRMSNorm(inner, eps)
        self.core = PackedAttention(False, attention, head_dim)
        self.out = nn.Linear(inner, size)

    def forward(self, x: Tensor, angles: Angles | None, segments: Segments) -> Tensor:
        q, k, v = self.qkv(x)
        q, k = by_head(q, self.q_norm, self.head_dim), by_head(k, self.k_norm, self.head_dim)
        if angles is not None:
            q, k = rotate(q, angles, pairs=True), rotate(k, angles, pairs=True)
        attended = self.core(q, k, by_head(v, None, self.head_dim), segments)
        return self.out(attended.flatten(1))


class CrossAttention(nn.Module):
    """Attend to a second packed sequence with one segment per sample, such as text."""

    def __init__(self, size: int, heads: int, head_dim: int, eps: float = 1e-6, attention: str = AUTO) -> None:
        super().__init__()
        self.head_dim, inner, self.implementation = head_dim, heads * head_dim, attention
        self.q = nn.Linear(size, inner)
        self.kv = Projections(size, k=inner, v=inner)
        self.q_norm, self.k_norm = FeatureRMSNorm(inner, eps), FeatureRMSNorm(inner, eps)
        self.out = nn.Linear(inner, size)

    def forward(self, x: Tensor, context: Tensor, segments: Segments, context_segments: Segments) -> Tensor:
        """Let tokens `x` attend to `context`. `segments`, `context_segments`: bounds of samples in each."""
        q = by_head(self.q(x), self.q_norm, self.head_dim)
        attended = self.attend(q, self.kv(context), self.k_norm, segments, context_segments)
        return self.out(attended.flatten(1))

    def attend(
        self,
        q: Tensor,
        kv: tuple[Tensor, Tensor],
        norm: nn.Module | None,
        segments: Segments,
        context_segments: Segments,
    ) -> Tensor:
        k, v = by_head(kv[0], norm, self.head_dim), by_head(kv[1], None, self.head_dim)
        return packed_cross_attention(q, k, v, segments, context_segments, implementation=self.implementation)
