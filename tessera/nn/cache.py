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
    """Room for `capacity` tokens in each of `rows` rows. `lengths` [rows] says how many are filled."""

    def __init__(
        self,
        layers: int,
        rows: int,
        capacity: int,
        heads: int,
        head_dim: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        shape = (layers, rows, capacity, heads, head_dim)
        # Zeros, not empty: attention multiplies what lies beyond `lengths` by zero, and stray memory may hold a NaN.
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.lengths = torch.zeros(rows, device=device, dtype=torch.int64)
        self.longest = 0  # of `lengths`, known on the host

    @property
    def rows(self) -> int:
        return self.keys.shape[1]

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

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
        return LayerCache(self, self.cache.keys[index], self.cache.values[index])

    def commit(self) -> None:
        self.cache.lengths = self.lengths
        self.cache.longest = self.longest


@dataclass(frozen=True)
class LayerCache:
    step: CacheStep
    keys: Tensor  # [rows, capacity, heads, head_dim]
    values: Tensor

    def write(self, k: Tensor, v: Tensor) -> None:
        self.keys[self.step.row, self.step.column] = k
        self.values[self.step.row, self.step.column] = v

    def filled(self) -> tuple[Tensor, Tensor]:
        """Keys and values without the columns that no row has reached yet."""
        return self.keys[:, : self.step.longest], self.values[:, : self.step.longest]
