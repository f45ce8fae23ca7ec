"""Define how one call of a model uses a KV cache. The caller decides it; the model does not inspect its cache.

The memory of a cache is a pool of blocks for `block_size` tokens each (`nn.cache.KVCache`). A row, one sequence that is
being generated, has a list of blocks. With one large block per row the cache is slotted; with small blocks it is paged.
Models and `ops.cached_attention` do not distinguish them. Between two calls rows may join, leave, or get more blocks.

Tensor shapes depend only on the number of rows, of tokens, and of blocks of a row. So a caller that pads these to fixed
numbers can capture a call in a CUDA graph. A padding token needs a block that belongs to no row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tessera.core.batch import Segments
from tessera.errors import TesseraError
from tessera.runtime import device as devices


class CacheRow(NamedTuple):
    """Describe a row in a call: its blocks, and its number of cached and of new tokens."""

    blocks: Sequence[int]  # indices of its blocks, in the order of its tokens
    cached: int  # tokens that the cache holds before the call
    new: int  # tokens that the call adds: a chunk of the prompt, then one in each decoding step
    sampled: bool = True  # whether the logits of its last token are needed; False inside of a prompt


@dataclass(frozen=True)
class CacheStep:
    """Describe how a call reads and writes the cache. The batch has the new tokens of one row after another.

    Rows with one new token should come first: their attention is computed together, without padding.
    """

    segments: Segments  # one segment for the new tokens of each row
    lengths: Tensor  # [rows] int64: number of tokens of each row, including new ones
    table: Tensor  # [rows, blocks of a row] int64: the blocks of each row; unused entries are arbitrary
    slots: Tensor  # [tokens] int64: where new keys and values are stored: block x block size + offset
    last: Tensor  # [sampled rows] int64: the tokens whose logits are needed
    block_size: int
    # The fields from here on are on the host, so that reading them needs no synchronisation.
    longest: int  # upper bound of the values in `lengths`
    single: int  # how many rows at the beginning have one new token
    prefill: bool  # True if no row has cached tokens: new tokens then attend to one another only

    packed: Tensor  # int64: bounds, lengths, table, slots and last, one after another; all but bounds are its views

    @staticmethod
    def of(rows: Sequence[CacheRow], block_size: int, device: torch.device | str, width: int = 0) -> CacheStep:
        """Return the `CacheStep` for these rows.

        `width`: least number of columns of the table; rows with more blocks enlarge it.
        """
        width = max(width, *(len(row.blocks) for row in rows))
        parts = _indices(rows, block_size, width)
        # Copy all index tensors to the device in one transfer.
        packed = devices.send(np.concatenate(parts), torch.int64, torch.device(device))
        on_device = packed.split([len(part) for part in parts])
        new = tuple(row.new for row in rows)
        return CacheStep(
            segments=Segments(on_device[0].to(torch.int32), max(new), new),
            lengths=on_device[1],
            table=on_device[2].view(len(rows), width),
            slots=on_device[3],
            last=on_device[4],
            block_size=block_size,
            longest=max(row.cached + row.new for row in rows),
            single=next((number for number, row in enumerate(rows) if row.new > 1), len(rows)),
            prefill=not any(row.cached for row in rows),
            packed=packed,
        )

    def refill(self, rows: Sequence[CacheRow]) -> None:
        """Overwrite the tensors for other rows, in one transfer. Each row must have as many new tokens as before.

        Blocks beyond the width of the table are left out.

        `longest` and `prefill` do not change, so they must be correct for the new rows, too.
        """
        assert [row.new for row in rows] == list(self.segments.lengths)
        parts = _indices(rows, self.block_size, self.table.shape[1])
        devices.send_to(self.packed, np.concatenate(parts))

    @property
    def rows(self) -> int:
        """Return the number of rows that the call processes."""
        return self.table.shape[0]


def _indices(rows: Sequence[CacheRow], block_size: int, width: int) -> tuple[np.ndarray, ...]:
    """Return the values of five tensors of a `CacheStep`: bounds, lengths, table, slots and last.

    `width`: number of columns of the table.
    """
    cached = np.array([row.cached for row in rows])
    new = np.array([row.new for row in rows])
    lengths, room = cached + new, block_size * np.array([len(row.blocks) for row in rows])
    if (lengths > room).any():
        at = int((lengths > room).argmax())
        raise TesseraError(
            f"the cache has room for {room[at]} tokens of a row, and {lengths[at]} are needed",
            fix="make the cache larger, or ask for fewer new tokens",
            code="generation.cache-full",
        )
    assert new.min() > 0, "a row without new tokens is no part of a call"
    table = np.zeros((len(rows), width), np.int64)
    for line, row in zip(table, rows, strict=True):
        line[: len(row.blocks)] = row.blocks[:width]
    bounds = np.concatenate([[0], new.cumsum()])
    member = np.repeat(np.arange(len(rows)), new)
    token = np.arange(len(member)) + (cached - bounds[:-1])[member]  # index of each new token in its row
    slots = table[member, token // block_size] * block_size + token % block_size
    last = bounds[1:][[row.sampled for row in rows]] - 1
    return bounds, lengths, table.ravel(), slots, last
