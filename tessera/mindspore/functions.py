"""Compute the layers of decoders and vision encoders with operators of MindSpore that have gradients on every device.

Statistics and sums are in the dtype of the inputs: float32 in training, float64 in tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mindspore as ms
import numpy as np
import torch
from mindspore import ops

Tensor = Any  # mindspore.Tensor: the package has no type annotations
JOINED = 512  # maximum number of tokens of segments that share one masked attention product


def from_torch(tensor: torch.Tensor) -> Tensor:
    """Return a copy of a tensor on the host as a tensor of MindSpore."""
    return ms.Tensor(tensor.detach().contiguous().numpy().copy())


def to_torch(tensor: Tensor) -> torch.Tensor:
    """Return a copy of a tensor of MindSpore on the host."""
    return torch.from_numpy(np.array(tensor.asnumpy()))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out = ops.matmul(x, weight.T)
    return out if bias is None else out + bias


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * (x * ops.rsqrt((x * x).mean(-1, keep_dims=True) + eps))


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(-1, keep_dims=True)
    return centred * ops.rsqrt((centred * centred).mean(-1, keep_dims=True) + eps) * weight + bias


def silu(x: Tensor) -> Tensor:
    return x * ops.sigmoid(x)


def quick_gelu(x: Tensor) -> Tensor:
    return x * ops.sigmoid(1.702 * x)


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + ops.erf(x * math.sqrt(0.5)))


def gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + ops.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "quick_gelu": quick_gelu,
    "gelu": gelu,
    "gelu_pytorch_tanh": gelu_tanh,
    "silu": silu,
}


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return `x` [T, H, D] rotated by angles [T, 1, R / 2], in the first R dimensions of each head."""
    half, size = cos.shape[-1], x.shape[-1]
    first, second, *rest = ops.split(x, [half, half, *([size - 2 * half] if size > 2 * half else [])], -1)
    return ops.cat([first * cos - second * sin, second * cos + first * sin, *rest], -1)


@dataclass(frozen=True)
class Spans:
    """Hold which tokens attend to each other: consecutive parts of a sequence, each with a mask [L, L] of zeros and
    negative infinity. None: all tokens of the part attend to each other."""

    lengths: tuple[int, ...]
    masks: tuple[Tensor | None, ...]

    @staticmethod
    def of(lengths: Sequence[int], causal: bool, dtype: torch.dtype) -> Spans:
        """Return the spans of segments. Short segments share a span, because one masked product for all of them costs
        less than a call for each."""
        spans: list[list[int]] = []
        for length in lengths:
            if spans and sum(spans[-1]) + length <= JOINED:
                spans[-1].append(length)
            else:
                spans.append([length])
        masks = [None if len(span) == 1 and not causal else _mask(span, causal, dtype) for span in spans]
        return Spans(tuple(map(sum, spans)), tuple(masks))


def _mask(lengths: Sequence[int], causal: bool, dtype: torch.dtype) -> Tensor:
    owner = torch.repeat_interleave(torch.tensor(lengths))
    allowed = owner[:, None] == owner[None, :]
    allowed = allowed.tril() if causal else allowed
    return from_torch(torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, -math.inf))


def attention(q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> Tensor:
    """Return attention [T, H x D] within each segment, from `q` [T, H, D] to `k`, `v` [T, KV, D]."""
    if len(spans.lengths) == 1:
        return _attend(q, k, v, spans.masks[0])
    parts = zip(*(ops.split(x, list(spans.lengths), 0) for x in (q, k, v)), spans.masks, strict=True)
    return ops.cat([_attend(*part) for part in parts], 0)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    length, heads, size = q.shape
    shared = k.shape[1]
    # [KV, G, L, D], with G query heads for each key-value head
    grouped = ops.transpose(q.reshape(length, shared, heads // shared, size), (1, 2, 0, 3))
    keys = ops.transpose(k, (1, 2, 0)).expand_dims(1)  # [KV, 1, D, L]
    values = ops.transpose(v, (1, 0, 2)).expand_dims(1)  # [KV, 1, L, D]
    scores = ops.matmul(grouped, keys) / math.sqrt(size)
    weights = ops.softmax(scores if mask is None else scores + mask, -1)
    return ops.transpose(ops.matmul(weights, values), (2, 0, 1, 3)).reshape(length, heads * size)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the cross-entropies of `logits` [N, V] and `labels` [N]."""
    shifted = logits - ops.stop_gradient(logits.max(-1, keepdims=True))
    chosen = ops.gather_elements(shifted, 1, labels.expand_dims(-1)).squeeze(-1)
    return (ops.log(ops.exp(shifted).sum(-1)) - chosen).sum()
