"""A data kind of made-up text: packed rows of tokens, each a function of its number and the seed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tessera.core.batch import IGNORE, Batch, Segments
from tessera.core.row_source import RowSource
from tessera.data.kinds import RowRequest
from tessera.runtime.rng import derive, generator

ROWS = 64


class TokenRows(RowSource):
    def __init__(self, length: int, vocabulary: int, seed: int) -> None:
        self.length = length
        self.vocabulary = vocabulary
        self.seed = seed

    def __len__(self) -> int:
        return ROWS

    def batch(self, rows: Sequence[int]) -> Batch:
        numbers = [row % ROWS for row in rows]
        packed = [self._row(n) for n in numbers]
        return Batch(
            {name: torch.cat([tensors[name] for tensors, _ in packed]) for name in ("tokens", "labels", "positions")},
            {"text": Segments.of([length for _, lengths in packed for length in lengths])},
            sample_ids=tuple(f"row-{n}" for n in numbers),
            counts={"samples": len(numbers), "tokens": len(numbers) * self.length},
            seeds=tuple(derive(self.seed, "row", n) for n in numbers),
        )

    def _row(self, number: int) -> tuple[dict[str, Tensor], list[int]]:
        """Samples of a few tokens, the first third of each not trained on, and padding behind them. Rows have more of
        it or less: they weigh differently. What follows a token depends on it, so that there is something to learn."""
        chance = generator("cpu", self.seed, "row", number)
        tokens = torch.zeros(self.length, dtype=torch.int64)
        labels = torch.full((self.length,), IGNORE)
        positions = torch.zeros(self.length, dtype=torch.int64)
        lengths: list[int] = []
        at, used = 0, self.length - int(torch.randint(0, self.length // 2, (), generator=chance))
        while at < used:
            length = min(used - at, int(torch.randint(3, max(4, self.length // 2), (), generator=chance)))
            noise = torch.randint(0, 4, (length,), generator=chance).cumsum(0)
            words = 1 + (noise * 5) % (self.vocabulary - 1)
            tokens[at : at + length] = words
            labels[at + length // 3 : at + length - 1] = words[length // 3 + 1 :]
            positions[at : at + length] = torch.arange(length)
            lengths.append(length)
            at += length
        if at < self.length:
            positions[at:] = torch.arange(self.length - at)
            lengths.append(self.length - at)
        return {"tokens": tokens, "labels": labels, "positions": positions}, lengths


def KIND(request: RowRequest) -> TokenRows:
    return TokenRows(request.section.length, request.section.options.get("vocabulary", 64), request.seed)
