"""The memory of a KV cache: a pool of blocks for each layer. The caller of a model decides in a `CacheStep` which
blocks a call reads and writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tessera.core.cache import CacheStep


class KVCache:
    """Hold keys and values of all layers in `blocks` blocks of `block_size` tokens each.

    Which rows use which blocks is decided by the caller (`CacheStep`). A layer's memory is allocated on its first
    write, when the number of heads, device and dtype are known.
    """

    def __init__(self, blocks: int, block_size: int) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values, [blocks, block_size, heads, head_dim]

    def layer(self, index: int, step: CacheStep) -> LayerCache:
        """Return the object through which layer `index` reads and writes this cache in one call."""
        return LayerCache(self, index, step)

    def allocate(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        if layer not in self.layers:
            # Zeros, because unused entries are multiplied by zero and uninitialised memory may contain NaN.
            shape = (self.blocks, self.block_size, *like.shape[1:])
            self.layers[layer] = (like.new_zeros(shape), like.new_zeros(shape))
        return self.layers[layer]

    @property
    def bytes(self) -> int:
        """Return the size of the allocated layers."""
        return sum(memory.nbytes for pair in self.layers.values() for memory in pair)

    def grow(self, blocks: int) -> None:
        """Enlarge the pool to this number of blocks. The contents of existing blocks stay."""
        more = blocks - self.blocks
        self.blocks = blocks
        for layer, (keys, values) in self.layers.items() if more else ():
            zeros = keys.new_zeros(more, *keys.shape[1:])
            self.layers[layer] = (torch.cat([keys, zeros]), torch.cat([values, zeros]))

    def clear(self, blocks: Sequence[int]) -> None:
        """Fill blocks with zeros. Unused entries are multiplied by zero, so a block must not keep NaN."""
        for pair in self.layers.values():
            for memory in pair:
                memory[torch.tensor(blocks, device=memory.device)] = 0


@dataclass(frozen=True)
class LayerCache:
    """Hold one layer's keys and values, and the `CacheStep` of the call."""

    cache: KVCache
    index: int
    step: CacheStep

    def store(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values of the new tokens, and return keys and values of all blocks."""
        keys, values = self.cache.allocate(self.index, k)
        keys.flatten(0, 1).index_copy_(0, self.step.slots, k)
        values.flatten(0, 1).index_copy_(0, self.step.slots, v)
        return keys, values
