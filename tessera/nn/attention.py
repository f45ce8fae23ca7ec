"""Attention between queries, keys and values that are there already: a module of its own, without weights, so that it
can be exchanged for one whose tokens lie on several ranks."""

from __future__ import annotations

from torch import Tensor, nn

from tessera.core.types import Segments
from tessera.ops.attention import packed_attention
from tessera.ops.registry import AUTO


class PackedAttention(nn.Module):
    """`q` [T, Hq, D] over `k`, `v` [T, Hkv, D], inside each segment."""

    def __init__(self, causal: bool, implementation: str = AUTO) -> None:
        super().__init__()
        self.causal = causal
        self.implementation = implementation

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
        return packed_attention(q, k, v, segments, causal=self.causal, implementation=self.implementation)
