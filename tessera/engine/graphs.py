"""Decode with graphs: the kernels of a call with one new token per row are captured once and launched together.

A captured call has fixed shapes. So the rows of a call are padded to one of a few numbers, and the table of blocks to
one of a few widths. Padding rows use a block that belongs to nobody. Matrix products of another number of rows may add
in another order, so the logits of a row can differ by rounding between these numbers.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tessera.core.batch import Batch
from tessera.core.cache import CacheRow, CacheStep
from tessera.core.outputs import LOGITS
from tessera.errors import first_line
from tessera.nn.cache import KVCache
from tessera.nn.decoder import TextDecoder
from tessera.runtime import device as devices

log = logging.getLogger("tessera")

ROWS = (1, 2, 4, 8, *range(16, 129, 8), *range(144, 257, 16))
_TOKENS = 512  # number of tokens that the narrowest block table covers; each wider table covers twice as many


@dataclass(frozen=True)
class _Captured:
    """Hold the inputs of a captured call, and its graph."""

    tokens: Tensor
    positions: Tensor
    step: CacheStep
    graph: devices.Graph


class DecodeGraphs:
    """Call a model with one new token per row. Calls that cannot be captured run without a graph."""

    def __init__(self, model: Any, cache: KVCache, padding_block: int, device: torch.device) -> None:
        """`padding_block`: a block of the cache that belongs to no row."""
        self._model = model
        self._cache = cache
        self._padding_block = padding_block
        self._device = device
        # (rows, width of the table, axes of positions, dtype of positions) -> captured call
        self._captured: dict[tuple[int, int, int, torch.dtype], _Captured] = {}
        self._memory: list[int] = []  # addresses of the cache that the captured calls use
        # Sharded weights communicate, which is not captured.
        plain = isinstance(model, nn.Module) and all(type(weight) is nn.Parameter for weight in model.parameters())
        self.usable = plain and devices.supports(device, "graphs")
        if self.usable:
            for module in model.modules():
                if isinstance(module, TextDecoder):
                    module.join_projections()

    @torch.no_grad()
    def run(self, tokens: Tensor, positions: Tensor, rows: Sequence[CacheRow]) -> Tensor:
        """Return logits [rows, vocabulary] of `tokens` [rows] at `positions`, [rows] or [3, rows].

        Captured calls overwrite the result of the last one.
        """
        captured = self._capture(positions, rows) if self.usable and len(rows) <= ROWS[-1] else None
        if captured is None:
            step = CacheStep.of(rows, self._cache.block_size, self._device)
            return self._call(tokens, positions, step)
        count = len(rows)
        padding = [self._padding()] * (captured.step.rows - count)
        captured.step.refill([*rows, *padding])
        captured.tokens[:count].copy_(tokens)
        captured.positions[..., :count].copy_(positions)
        return captured.graph.launch()[:count]

    def clear(self) -> None:
        """Drop captured calls.

        Needed after modules or the memory of weights were replaced, but not after weights got new values.
        """
        self._captured.clear()

    def _capture(self, positions: Tensor, rows: Sequence[CacheRow]) -> _Captured | None:
        """Return the captured call for these rows, or None if it cannot be captured."""
        memory = [pool.data_ptr() for layer in self._cache.layers.values() for pool in layer]
        if memory != self._memory:
            self.clear()
            self._memory = memory
        size = self._cache.block_size
        count, longest = ROWS[bisect_left(ROWS, len(rows))], max(row.cached + 1 for row in rows)
        reach = _TOKENS
        while reach < longest:
            reach *= 2
        key = (count, -(-reach // size), positions.dim(), positions.dtype)
        if key not in self._captured:
            try:
                self._captured[key] = self._captured_call(*key)
            except Exception as error:  # an operation of the model may raise any error during the capture
                log.warning(
                    "calls of this model cannot be captured in a graph, so decoding is slower: %s", first_line(error)
                )
                self.usable = False
                self.clear()
                return None
            self._memory = [pool.data_ptr() for layer in self._cache.layers.values() for pool in layer]
        return self._captured[key]

    def _captured_call(self, count: int, width: int, axes: int, kind: torch.dtype) -> _Captured:
        tokens = torch.zeros(count, dtype=torch.int64, device=self._device)
        positions = torch.zeros((3, count) if axes == 2 else count, dtype=kind, device=self._device)
        step = CacheStep.of([self._padding()] * count, self._cache.block_size, self._device, width)
        # A captured call must work for all rows that fit into the table, and attends to keys in the cache.
        step = replace(step, longest=width * self._cache.block_size, prefill=False)
        pool = next((other.graph.pool for other in self._captured.values()), None)
        graph = devices.Graph(self._device, lambda: self._call(tokens, positions, step), pool)
        return _Captured(tokens, positions, step, graph)

    def _padding(self) -> CacheRow:
        return CacheRow([self._padding_block], 0, 1)

    def _call(self, tokens: Tensor, positions: Tensor, step: CacheStep) -> Tensor:
        batch = Batch({"tokens": tokens, "positions": positions})
        logits: Tensor = self._model(batch, logits="last", cache=self._cache, step=step)[LOGITS]
        return logits
