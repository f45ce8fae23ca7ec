"""A text decoder whose layers also attend to the outputs of an encoder (cross-attention), with learned positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tessera.core.batch import Segments
from tessera.core.cache import CacheStep
from tessera.nn.cache import KVCache, LayerCache
from tessera.nn.layers import LayerNorm, PackedAttention, TokenEmbedding
from tessera.nn.vit import EncoderMLP
from tessera.ops.cached_attention import cached_attention
from tessera.ops.cross_attention import packed_cross_attention
from tessera.ops.registry import AUTO


@dataclass(frozen=True)
class CrossDecoderShape:
    """Hold the sizes and options of a decoder. The outputs of the encoder have the width `hidden`, too."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    positions: int  # number of learned position embeddings: the largest number of tokens of a sample
    activation: str = "gelu"
    norm_eps: float = 1e-5
    attention: str = AUTO  # implementation of attention

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def layer_weights(self) -> int:
        """Return how many weights of a layer each token is multiplied by.

        Weights for the encoder's outputs are not counted.
        """
        return 6 * self.hidden**2 + 2 * self.hidden * self.intermediate

    @property
    def memory_weights(self) -> int:
        """Return how many weights of a layer each output of the encoder is multiplied by."""
        return 2 * self.hidden**2


class MemoryCache(KVCache):
    """Hold the KV cache of a decoder, and keys and values of the encoder's outputs (`memory`), computed only once."""

    def __init__(self, blocks: int, block_size: int) -> None:
        super().__init__(blocks, block_size)
        self.memory: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> keys and values, each [M, heads, head size]


class CausalAttention(nn.Module):
    """Compute causal self-attention. The projection of keys has no bias."""

    def __init__(self, shape: CrossDecoderShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.q = nn.Linear(shape.hidden, shape.hidden)
        self.k = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.v = nn.Linear(shape.hidden, shape.hidden)
        self.o = nn.Linear(shape.hidden, shape.hidden)
        self.core = PackedAttention(True, shape.attention, shape.head_dim)

    def forward(self, x: Tensor, segments: Segments, cache: LayerCache | None) -> Tensor:
        # -1 infers the number of heads: under tensor parallelism a rank has only some of them.
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.q, self.k, self.v))
        keys, values = (k, v) if cache is None else cache.store(k, v)
        if cache is None or cache.step.prefill:
            out = self.core(q, k, v, segments)
        else:
            out = cached_attention(q, keys, values, cache.step)
        return self.o(out.flatten(1))


class KeysAndValues(nn.Module):
    """Project the encoder's outputs to keys and values: in one module, so that tensor parallelism sums one gradient."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.k = nn.Linear(hidden, hidden, bias=False)
        self.v = nn.Linear(hidden, hidden)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        return self.k(states), self.v(states)


class MemoryAttention(nn.Module):
    """Attend from each segment of tokens to the encoder's outputs for the same segment."""

    def __init__(self, shape: CrossDecoderShape) -> None:
        super().__init__()
        self.head_dim, self.implementation = shape.head_dim, shape.attention
        self.q = nn.Linear(shape.hidden, shape.hidden)
        self.kv = KeysAndValues(shape.hidden)
        self.o = nn.Linear(shape.hidden, shape.hidden)

    def forward(
        self,
        x: Tensor,
        segments: Segments,
        memory: Tensor | None,
        memory_segments: Segments,
        cache: LayerCache | None,
    ) -> Tensor:
        """Return the output for tokens `x`. `memory`: the encoder's outputs; None: the cache has keys and values."""
        q = self.q(x).unflatten(-1, (-1, self.head_dim))
        projected_memory = cache.cache.memory if cache is not None and isinstance(cache.cache, MemoryCache) else {}
        if memory is None:
            assert cache is not None, "without a cache, each call needs the outputs of the encoder"
            k, v = projected_memory[cache.index]
        else:
            k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in self.kv(memory))
            if cache is not None:
                projected_memory[cache.index] = (k, v)
        out = packed_cross_attention(q, k, v, segments, memory_segments, implementation=self.implementation)
        return self.o(out.flatten(1))


class CrossDecoderLayer(nn.Module):
    def __init__(self, shape: CrossDecoderShape) -> None:
        super().__init__()
        self.attn_norm = LayerNorm(shape.hidden, shape.norm_eps)
        self.attn = CausalAttention(shape)
        self.cross_norm = LayerNorm(shape.hidden, shape.norm_eps)
        self.cross = MemoryAttention(shape)
        self.mlp_norm = LayerNorm(shape.hidden, shape.norm_eps)
        self.mlp = EncoderMLP(shape.hidden, shape.intermediate, shape.activation)

    def forward(
        self,
        x: Tensor,
        segments: Segments,
        memory: Tensor | None,
        memory_segments: Segments,
        cache: LayerCache | None = None,
    ) -> Tensor:
        x = x + self.attn(self.attn_norm(x), segments, cache)
        x = x + self.cross(self.cross_norm(x), segments, memory, memory_segments, cache)
        return x + self.mlp(self.mlp_norm(x))


class TokenPositions(nn.Module):
    """Hold learned position embeddings."""

    def __init__(self, positions: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(positions, hidden))

    def forward(self, positions: Tensor) -> Tensor:
        return self.weight.index_select(0, positions)


class CrossDecoder(nn.Module):
    """Compute final hidden states from embeddings. Modules that are None belong to another pipeline stage."""

    def __init__(self, shape: CrossDecoderShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed: nn.Embedding | None = TokenEmbedding(shape.vocab, shape.hidden)
        self.positions: TokenPositions | None = TokenPositions(shape.positions, shape.hidden)
        self.layers = nn.ModuleList(CrossDecoderLayer(shape) for _ in range(shape.layers))
        self.norm: LayerNorm | None = LayerNorm(shape.hidden, shape.norm_eps)

    def forward(
        self,
        x: Tensor,
        segments: Segments,
        memory: Tensor | None,
        memory_segments: Segments,
        cache: KVCache | None = None,
        step: CacheStep | None = None,
    ) -> Tensor:
        """Return the hidden states of tokens with embeddings `x`. `cache` and `step`: see `core.cache`.

        `memory`: outputs of the encoder, with one segment for each segment of tokens; it has the length 0 for tokens
        without a recording, such as padding. None: the cache has their keys and values.
        """
        for index, layer in enumerate(self.layers):
            if layer is not None:
                of_layer = None if cache is None or step is None else cache.layer(index, step)
                x = layer(x, segments, memory, memory_segments, of_layer)
        return x if self.norm is None else self.norm(x)
