"""The memory of a KV cache: a pool of blocks for each layer. What one call does with it is a `CacheStep`, which the
caller of a model makes and passes in."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tessera.core.cache import CacheStep


class KVCache:
    """Hold keys and values of all layers in `blocks` blocks of `block_size` tokens each.

    It does not know which rows there are. Memory of a layer is allocated when the layer first writes: heads of this
    rank, device and type are known then.
    """

    def __init__(self, blocks: int, block_size: int) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values, [blocks, block_size, heads, head_dim]

    def layer(self, index: int, step: CacheStep) -> LayerCache:
        """Return what a layer needs in one call."""
        return LayerCache(self, index, step)

    def allocate(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        if layer not in self.layers:
            # Zeros, not empty: unused entries are multiplied by zero, and uninitialised memory may be NaN.
            shape = (self.blocks, self.block_size, *like.shape[1:])
            self.layers[layer] = (like.new_zeros(shape), like.new_zeros(shape))
        return self.layers[layer]


@dataclass(frozen=True)
class LayerCache:
    """Hold one layer's part of a cache, and what the call does with it."""

    cache: KVCache
    index: int
    step: CacheStep

    def store(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values of the new tokens, and return those of all blocks."""
        keys, values = self.cache.allocate(self.index, k)
        keys.flatten(0, 1).index_copy_(0, self.step.slots, k)
        values.flatten(0, 1).index_copy_(0, self.step.slots, v)
        return keys, values
