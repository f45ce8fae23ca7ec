"""Attention of packed sequences that begin with a very long segment: the video of a row, and then perhaps its padding.

cuDNN is the fastest kernel on Hopper for them, especially for few keys (text), where flash attention leaves a part of
the device idle. It builds a plan on the host for every new shape, which pays off only for long segments. At most one
segment follows, which uses flash attention.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tessera.ops.block_attention import block_attention, block_attention_backward
from tessera.runtime import device as devices
from tessera.runtime.torch_internals import cudnn_attention_backward, cudnn_attention_forward

_VERY_LONG = 4096  # minimum number of tokens of a segment from which building a cuDNN plan pays off


def first_segment_serves(q: Tensor, count: int, first: int) -> bool:
    """Return whether a sequence of `count` segments should use these kernels. `first`: queries in the first segment."""
    size = q.shape[-1]
    return first >= _VERY_LONG and count <= 2 and serves_heads(q, size)


def serves_heads(q: Tensor, size: int) -> bool:
    """Return whether the device supports cuDNN attention for this head size."""
    return size % 8 == 0 and size <= 128 and supports_here(q.device, "cudnn_attention")


@functools.cache
def supports_here(device: torch.device, what: str) -> bool:
    """Return whether the device has a capability. Cached, because asking the driver is slow.

    It is only called from custom operators, which are not traced: the compiler would warn about the cache.
    """
    return devices.supports(device, what)


def first_segment_attention(
    q: Tensor, k: Tensor, v: Tensor, first: tuple[int, int], scale: float
) -> tuple[Tensor, Tensor]:
    """Return attention [T, H, D] within the first segment and within the rest, without a mask or autograd.

    Also return log-sum-exp, flat.
    """
    at, key_at = first
    rows = [x[None, :end].transpose(1, 2) for x, end in ((q, at), (k, key_at), (v, key_at))]
    out, lse = cudnn_attention_forward(rows[0], rows[1], rows[2], False, scale)
    out, lse = out.transpose(1, 2)[0], lse.flatten()
    if at == q.shape[0]:
        return out, lse
    q, k, v = q[at:], k[key_at:], v[key_at:]
    if len(k):
        rest, rest_lse = block_attention(q, k, v, segments=None, causal=False, scale=scale)
    else:  # padding has no keys
        rest, rest_lse = torch.zeros_like(q), lse.new_zeros(q.shape[1], q.shape[0])
    return torch.cat([out, rest]), torch.cat([lse, rest_lse.flatten()])


def first_segment_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, first: tuple[int, int], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values."""
    (at, key_at), heads = first, q.shape[1]
    ends = ((grad, at), (q, at), (k, key_at), (v, key_at), (out, at))
    sums, rest_sums = lse[: heads * at], lse[heads * at :]
    gradients = cudnn_attention_backward(
        [x[None, :end].transpose(1, 2) for x, end in ends], sums.view(1, heads, at, 1), False, scale
    )
    dq, dk, dv = (x.transpose(1, 2)[0] for x in gradients)
    if at == q.shape[0] and key_at == k.shape[0]:
        return dq, dk, dv
    grad, q, k, v, out = (x[end:] for x, end in ends)
    if len(q) and len(k):
        rest = block_attention_backward(
            grad, q, k, v, out, rest_sums.view(heads, -1), segments=None, causal=False, scale=scale
        )
    else:
        rest = (torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v))
    return (
        torch.cat([dq, rest[0].to(dq.dtype)]),
        torch.cat([dk, rest[1].to(dk.dtype)]),
        torch.cat([dv, rest[2].to(dv.dtype)]),
    )
