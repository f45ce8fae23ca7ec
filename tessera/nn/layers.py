"""Layers that text decoders and encoders share: normalisation, token embedding, tied head, packed attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tessera.core.batch import Segments
from tessera.ops.attention import packed_attention
from tessera.ops.pointwise import layer_norm, rms_norm
from tessera.ops.registry import AUTO
from tessera.ops.vocab import vocab_embedding, vocab_logits
from tessera.runtime.modules import AttentionCore


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class LayerNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)


class TokenEmbedding(nn.Embedding):
    """Look up token embeddings. The table may be sharded by rows (`ops.vocab`)."""

    def forward(self, tokens: Tensor) -> Tensor:
        return vocab_embedding(tokens, self.weight)


class TiedHead(nn.Module):
    """Compute logits with the weight of the token embedding. An untied head is an `nn.Linear`.

    The weight is read from the embedding at each call. It then has a single name in state dicts, and stays shared when
    parameters are replaced on leaving the meta device or by sharding.
    """

    def __init__(self, embed: nn.Embedding) -> None:
        super().__init__()
        self._embed = (embed,)  # in a tuple, so it is not registered as a submodule

    @property
    def weight(self) -> Tensor:
        return self._embed[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return vocab_logits(x, self.weight)


class PackedAttention(AttentionCore):
    """Attend within each segment, from `q` [T, Hq, D] to `k`, `v` [T, Hkv, D]."""

    causal: bool

    def __init__(self, causal: bool, implementation: str = AUTO, head_dim: int | None = None) -> None:
        super().__init__()
        self.causal = causal
        self.implementation = implementation
        self.head_dim = head_dim

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
        return packed_attention(q, k, v, segments, causal=self.causal, implementation=self.implementation)
