"""Keys and values of what was already read, so that generating a token costs one token.

A forward pass with a cache asks it for a `CacheStep`: where the tokens of this pass go. Each layer writes through its
own `LayerCache`; the model commits the step when all layers have written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tessera.core.errors import TesseraError
from tessera.core.types import Segments


class KVCache:
    """Room for `capacity` tokens in each of `rows` rows. `lengths` [rows] says how many are filled.

    A layer's room is made when it first writes: it knows how many heads it has here, on which device and of what type.
    """

    def __init__(self, rows: int, capacity: int, device: torch.device | str | None = None) -> None:
        self.rows = rows
        self.capacity = capacity
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values, [rows, capacity, heads, head_dim] each
        self.lengths = torch.zeros(rows, device=device, dtype=torch.int64)
        self.longest = 0  # of `lengths`, known on the host

    def room(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        if layer not in self.layers:
            # Zeros, not empty: what lies beyond `lengths` is multiplied by zero, and stray memory may hold a NaN.
            shape = (self.rows, self.capacity, *like.shape[1:])
            self.layers[layer] = (like.new_zeros(shape), like.new_zeros(shape))
        return self.layers[layer]

    @property
    def empty(self) -> bool:
        return self.longest == 0

    def prefill(self, segments: Segments, tokens: int) -> CacheStep:
        """Segment i becomes row i."""
        count = segments.bounds.numel() - 1
        if count != self.rows:
            raise TesseraError(f"{count} segments do not fit a cache of {self.rows} rows")
        self._make_room(segments.longest)
        bounds = segments.bounds.to(torch.int64)
        at = torch.arange(tokens, device=bounds.device)
        row = torch.searchsorted(bounds[1:], at, right=True)
        return CacheStep(self, row, at - bounds[row], bounds.diff(), segments.longest, decoding=False)

    def decode(self, tokens: int) -> CacheStep:
        """One more token in every row."""
        if tokens != self.rows:
            raise TesseraError(f"decoding takes one token per row: {tokens} tokens for {self.rows} rows of the cache")
        self._make_room(self.longest + 1)
        row = torch.arange(self.rows, device=self.lengths.device)
        return CacheStep(self, row, self.lengths, self.lengths + 1, self.longest + 1, decoding=True)

    def _make_room(self, needed: int) -> None:
        if needed > self.capacity:
            raise TesseraError(
                f"the cache holds {self.capacity} tokens per row, {needed} are needed",
                fix="make the cache larger, or ask for fewer new tokens",
            )


@dataclass(frozen=True)
class CacheStep:
    """One forward pass over a cache: token t goes to (`row[t]`, `column[t]`); afterwards rows are `lengths` long."""

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
        keys, values = self.step.cache.room(self.layer, k)
        keys[self.step.row, self.step.column] = k
        values[self.step.row, self.step.column] = v

    def filled(self) -> tuple[Tensor, Tensor]:
        """Keys and values without the columns that no row has reached yet."""
        keys, values = self.step.cache.layers[self.layer]
        return keys[:, : self.step.longest], values[:, : self.step.longest]
