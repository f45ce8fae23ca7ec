"""Root-mean-square and layer normalisation. Statistics are taken in fp32 whatever the type of the input."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.ops.registry import AUTO, Implementation, Operation


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, implementation: str = AUTO) -> Tensor:
    run = RMS_NORM.choose(implementation, "plain", x.device, x.dtype)
    out: Tensor = run(x, weight, eps)
    return out


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, implementation: str = AUTO) -> Tensor:
    run = LAYER_NORM.choose(implementation, "plain", x.device, x.dtype)
    out: Tensor = run(x, weight, bias, eps)
    return out


def _rms_norm_eager(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def _rms_norm_fused(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def _layer_norm_eager(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    out = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight.float()
    if bias is not None:
        out = out + bias.float()
    return out.to(x.dtype)


def _layer_norm_fused(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, eps)


RMS_NORM = Operation("rms_norm", (Implementation("fused", _rms_norm_fused), Implementation("eager", _rms_norm_eager)))
LAYER_NORM = Operation(
    "layer_norm", (Implementation("fused", _layer_norm_fused), Implementation("eager", _layer_norm_eager))
)
