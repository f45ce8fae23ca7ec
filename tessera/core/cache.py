"""Define what one call of a model does with a KV cache. The caller decides it; a model never inspects its cache.

The memory of a cache is a pool of blocks, each with room for `block_size` tokens (`nn.cache.KVCache`). A row, one
sequence that is being generated, has a list of blocks. With one large block for each row the cache is slotted; with
small blocks it is paged. Both are the same to a model and to `ops.cached_attention`. Between two calls rows may join,
leave, or get more blocks.

All tensors have shapes that follow from the numbers of rows, tokens and blocks of a row, so a caller that pads these to
fixed numbers can capture a call in a graph. A padding token needs a block that no row has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from tessera.core.batch import Segments
from tessera.errors import TesseraError
from tessera.runtime import device as devices


@dataclass(frozen=True)
class CacheRow:
    """Describe one row's part in a call: where its tokens are stored, and how many are cached and added."""

    blocks: Sequence[int]  # in the order of its tokens
    cached: int  # tokens that the cache holds before the call
    new: int  # tokens that the call adds: one while decoding, a chunk of the prompt before
    sampled: bool = True  # whether the logits of its last token are needed: not before its prompt ends


@dataclass(frozen=True)
class CacheStep:
    """Hold what one call does with the cache. The batch has the new tokens of the first row, then of the second row,
    and so on.

    Rows with one new token should come first: their attention is computed together, without padding.
    """

    segments: Segments  # of the new tokens, one for each row
    lengths: Tensor  # [rows] int64: tokens of each row, with the new ones
    table: Tensor  # [rows, blocks of a row] int64: the blocks of each row; any block behind the last one
    slots: Tensor  # [tokens] int64: where new keys and values are stored: block x block size + offset
    last: Tensor  # [sampled rows] int64: the tokens whose logits are needed
    block_size: int
    # On the host, so that reading them needs no synchronisation. `longest` may be larger than the maximum.
    longest: int  # the maximum of `lengths`
    single: int  # how many rows at the beginning have one new token
    prefill: bool  # no row has cached tokens: new tokens attend to one another alone

    @staticmethod
    def of(rows: Sequence[CacheRow], block_size: int, device: torch.device | str, width: int = 0) -> CacheStep:
        """Return the step of these rows. `width`: columns of the table, if it should have more than are needed."""
        for row in rows:
            if row.cached + row.new > len(row.blocks) * block_size:
                raise TesseraError(
                    f"the cache has room for {len(row.blocks) * block_size} tokens of a row, and "
                    f"{row.cached + row.new} are needed",
                    fix="make the cache larger, or ask for fewer new tokens",
                    code="generation.cache-full",
                )
            assert row.new > 0, "a row without new tokens is no part of a call"
        width = max(width, *(len(row.blocks) for row in rows))
        table = [[*row.blocks, *[0] * (width - len(row.blocks))] for row in rows]
        slots = [
            row.blocks[at // block_size] * block_size + at % block_size
            for row in rows
            for at in range(row.cached, row.cached + row.new)
        ]
        ends = [*accumulate(row.new for row in rows)]
        single = next((number for number, row in enumerate(rows) if row.new > 1), len(rows))
        lengths = [row.cached + row.new for row in rows]
        last = [end - 1 for end, row in zip(ends, rows, strict=True) if row.sampled]
        new = tuple(row.new for row in rows)
        parts = ([0, *ends], lengths, [block for blocks in table for block in blocks], slots, last)
        # One transfer for all of them.
        sent = devices.send([number for part in parts for number in part], torch.int64, torch.device(device))
        on_device = sent.split([len(part) for part in parts])
        return CacheStep(
            segments=Segments(on_device[0].to(torch.int32), max(new), new),
            lengths=on_device[1],
            table=on_device[2].view(len(rows), width),
            slots=on_device[3],
            last=on_device[4],
            block_size=block_size,
            longest=max(lengths),
            single=single,
            prefill=not any(row.cached for row in rows),
        )

    @property
    def rows(self) -> int:
        """Return the number of rows in the call."""
        return self.table.shape[0]
