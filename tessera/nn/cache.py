"""The KV cache of generation.

A forward pass with a cache asks it for a `CacheStep`, which says where the tokens of this pass are stored. Each layer
writes through its own `LayerCache`; the model commits the step when all layers have written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tessera.core.batch import Segments
from tessera.errors import TesseraError


class KVCache:
    """Hold keys and values of up to `capacity` tokens in each of `rows` rows; `lengths` [rows] are filled.

    Memory of a layer is allocated when it first writes: heads of this rank, device and dtype are known then.
    """

    def __init__(self, rows: int, capacity: int, device: torch.device | str | None = None) -> None:
        self.rows = rows
        self.capacity = capacity
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values, [rows, capacity, heads, head_dim] each
        self.lengths = torch.zeros(rows, device=device, dtype=torch.int64)
        self.longest = 0  # maximum of `lengths`, on the host

    def allocate(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        if layer not in self.layers:
            # Zeros, not empty: entries beyond `lengths` are multiplied by zero, and uninitialised memory may be NaN.
            shape = (self.rows, self.capacity, *like.shape[1:])
            self.layers[layer] = (like.new_zeros(shape), like.new_zeros(shape))
        return self.layers[layer]

    @property
    def empty(self) -> bool:
        return self.longest == 0

    def prefill(self, segments: Segments, tokens: int) -> CacheStep:
        """Return the step that stores segment i in row i."""
        count = segments.bounds.numel() - 1
        if count != self.rows:
            raise TesseraError(f"{count} segments do not fit a cache of {self.rows} rows")
        self._check_capacity(segments.longest)
        bounds = segments.bounds.to(torch.int64)
        at = torch.arange(tokens, device=bounds.device)
        row = torch.searchsorted(bounds[1:], at, right=True)
        return CacheStep(self, row, at - bounds[row], bounds.diff(), segments.longest, decoding=False)

    def decode(self, tokens: int) -> CacheStep:
        """Return the step that stores one more token in every row."""
        if tokens != self.rows:
            raise TesseraError(f"decoding takes one token per row: {tokens} tokens for {self.rows} rows of the cache")
        self._check_capacity(self.longest + 1)
        row = torch.arange(self.rows, device=self.lengths.device)
        return CacheStep(self, row, self.lengths, self.lengths + 1, self.longest + 1, decoding=True)

    def _check_capacity(self, needed: int) -> None:
        if needed > self.capacity:
            raise TesseraError(
                f"the cache holds {self.capacity} tokens per row, {needed} are needed",
                fix="make the cache larger, or ask for fewer new tokens",
            )


@dataclass(frozen=True)
class CacheStep:
    """Describe one forward pass: token t is stored at (`row[t]`, `column[t]`); then rows have `lengths` tokens."""

    cache: KVCache
    row: Tensor
    column: Tensor
    lengths: Tensor
    longest: int
    decoding: bool

    def layer(self, index: int) -> LayerCache:
        return LayerCache(self, index)

    def commit(self) -> None:
        self.cache.lengths = self.lengths
        self.cache.longest = self.longest


@dataclass(frozen=True)
class LayerCache:
    step: CacheStep
    layer: int

    def write(self, k: Tensor, v: Tensor) -> None:
        keys, values = self.step.cache.allocate(self.layer, k)
        keys[self.step.row, self.step.column] = k
        values[self.step.row, self.step.column] = v

    def filled(self) -> tuple[Tensor, Tensor]:
        """Return keys and values up to the longest row."""
        keys, values = self.step.cache.layers[self.layer]
        return keys[:, : self.step.longest], values[:, : self.step.longest]
