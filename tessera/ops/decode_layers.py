"""Compute the layers of a decoder for one new token per row, with few kernels.

Only a mixture of experts is called as a module. `nn.decoder` passes the weights of all other modules of a layer, if the
layer has no adapters, no output norms, and is not sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.core.cache import CacheStep
from tessera.ops.pointwise import Angles
from tessera.runtime import device as devices


@dataclass(frozen=True)
class LayerWeights:
    """Hold the weights of a layer. Those of q, k and v are one tensor, and so are those of gate and up."""

    attn_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norms: tuple[Tensor, Tensor] | None
    o: Tensor
    mlp_norm: Tensor
    gate_up: Tensor | None  # None: the layer has no gated MLP, and `mlp` computes its MLP
    down: Tensor | None
    mlp: Callable[[Tensor], Tensor]
    eps: float


def can_decode(x: Tensor) -> bool:
    """Return whether `decode_layers` can run on `x`: without gradients, outside of compiled graphs, on this device."""
    fits = x.dtype in (torch.bfloat16, torch.float16, torch.float32)
    idle = torch.is_grad_enabled() or torch.compiler.is_compiling() or devices.supports(x.device, "no_values")
    return fits and not idle and devices.supports(x.device, "triton")


@torch.no_grad()
def join(parameters: Sequence[Tensor]) -> None:
    """Move frozen parameters to adjacent memory. Their shapes may differ only in the first dimension."""
    if len(parameters) > 1 and adjacent(parameters) is None and not any(p.requires_grad for p in parameters):
        joined = torch.cat([parameter.detach() for parameter in parameters])
        parts = torch.split(joined, [len(parameter) for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.data = part


def adjacent(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return tensors that are adjacent in memory as a view, joined along the first dimension; None if they are not."""
    first, at = tensors[0], tensors[0].data_ptr()
    for tensor in tensors:
        same = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() and tensor.dtype == first.dtype
        if not same or tensor.data_ptr() != at or not tensor.is_contiguous() or tensor.shape[1:] != first.shape[1:]:
            return None
        at += tensor.numel() * tensor.element_size()
    size = (sum(len(tensor) for tensor in tensors), *first.shape[1:])
    return first.detach().as_strided(size, first.stride())


Store = Callable[[int], tuple[Tensor, Tensor]]  # layer -> its keys and values in the cache


def decode_layers(
    layers: Sequence[LayerWeights], norm: tuple[Tensor, float], x: Tensor, angles: Angles, pool: Store, step: CacheStep
) -> Tensor:
    """Return the normalised hidden states [R, H] of embeddings `x` [R, H], one token per row."""
    from tessera.ops.decode_kernels import add_norm, gated, rotate_and_store, vector_linear
    from tessera.ops.paged_attention import paged_attention

    alone = x.shape[0] == 1
    update: Tensor | None = None
    for index, layer in enumerate(layers):
        if alone:
            qkv = vector_linear(x, layer.qkv, layer.qkv_bias, norm=(layer.attn_norm, layer.eps))
        else:
            x, normed = add_norm(x, update, layer.attn_norm, layer.eps)
            qkv = F.linear(normed, layer.qkv, layer.qkv_bias)
        keys, values = pool(index)
        q = rotate_and_store(qkv, layer.qk_norms, layer.eps, angles.cos, angles.sin, keys, values, step.slots)
        out = paged_attention(q, keys, values, step.table, step.lengths, step.longest, q.shape[-1] ** -0.5).flatten(1)
        update = None
        if alone:
            x = vector_linear(out, layer.o, residual=x)
        else:
            update = F.linear(out, layer.o)
        if layer.gate_up is None or layer.down is None:
            x, normed = add_norm(x, update, layer.mlp_norm, layer.eps)
            update = layer.mlp(normed)
            if alone:
                x, update = x + update, None
        elif alone:
            inner = vector_linear(x, layer.gate_up, norm=(layer.mlp_norm, layer.eps), gate=True)
            x = vector_linear(inner, layer.down, residual=x)
        else:
            x, normed = add_norm(x, update, layer.mlp_norm, layer.eps)
            update = F.linear(gated(F.linear(normed, layer.gate_up)), layer.down)
    return add_norm(x, update, *norm)[1]
