"""Initialize adapters from the weights of their layers: norms of rows (DoRA), singular vectors (PiSSA)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tessera.lora.modules import LoraLinear, adapted_layers
from tessera.runtime.modules import copy_shard, seeded, whole_tensor

WHOLE_SVD = 1024  # layers with more singular values than this get a randomized SVD
_ITERATIONS = 16


@torch.no_grad()
def start_from_weights(module: nn.Module) -> None:
    """Initialize DoRA and PiSSA adapters from the weights of their layers, which must be loaded before.

    All ranks that share a layer must call this together: weights are gathered layer by layer."""
    for path, layer in adapted_layers(module).items():
        if not (layer.adapter.dora or layer.adapter.pissa):
            continue
        base_weight = layer.base_weight(torch.float32)
        weight = whole_tensor(base_weight).float()
        if layer.lora_m is not None:
            copy_shard(layer.lora_m.weight, weight.norm(dim=1))
        if layer.adapter.pissa:
            _start_pissa(layer, weight, path)


def _start_pissa(layer: LoraLinear, weight: Tensor, path: str) -> None:
    assert layer.lora_a0 is not None
    assert layer.lora_b0 is not None
    a, b = principal_factors(weight, layer.adapter.rank, layer.adapter.scale, path)
    for factor, value in ((layer.lora_a, a), (layer.lora_a0, a), (layer.lora_b, b), (layer.lora_b0, b)):
        copy_shard(factor.weight, value)


def principal_factors(weight: Tensor, rank: int, scale: float, name: str) -> tuple[Tensor, Tensor]:
    """Return A [rank, in] and B [out, rank], so that `scale` B A is the part of the weight with the largest singular
    values.

    The signs are fixed (the largest element of each output vector is positive), so that all ranks compute the same.
    """
    if min(weight.shape) <= WHOLE_SVD:
        u, s, vt = torch.linalg.svd(weight, full_matrices=False)
    else:
        with seeded("pissa", name):
            drawn = torch.randn(weight.shape[1], 2 * rank).to(weight.device)
        u, s, vt = _leading(weight, drawn)
    u, s, vt = u[:, :rank], s[:rank], vt[:rank]
    if u.shape[1] < rank:
        u, s, vt = (nn.functional.pad(x, pad) for x, pad in _missing(u, s, vt, rank))
    signs = torch.sign(u.gather(0, u.abs().argmax(0, keepdim=True))).where(s > 0, 1.0)
    root = (s / scale).sqrt()
    return (root[:, None] * (vt * signs.T)).contiguous(), (u * signs * root).contiguous()


def _missing(u: Tensor, s: Tensor, vt: Tensor, rank: int) -> list[tuple[Tensor, tuple[int, ...]]]:
    """Pad the tensors with zeros, for a layer with fewer singular values than the adapter's rank."""
    more = rank - s.shape[0]
    return [(u, (0, more)), (s, (0, more)), (vt, (0, 0, 0, more))]


def _leading(weight: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest singular values and their vectors, by subspace iteration from random vectors."""
    basis = torch.linalg.qr(weight @ drawn).Q
    for _ in range(_ITERATIONS):
        basis = torch.linalg.qr(weight @ torch.linalg.qr(weight.T @ basis).Q).Q
    u, s, vt = torch.linalg.svd(basis.T @ weight, full_matrices=False)
    return basis @ u, s, vt
