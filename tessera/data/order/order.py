"""Which row comes when: a pure function of (seed, row number).

Nothing here knows ranks, workers or micro-batches, so any of them may change between two runs. Every place is computed
by itself: the row of step 10^9 costs as much as the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tessera.data.order.shuffle import Shuffle, mix
from tessera.data.order.table import RowTable

_PASS, _ROW = 0x50415353, 0x524F57


@dataclass(frozen=True, eq=False)
class Order:
    """Row number -> samples, over all passes. The rows of every pass hold the same slots, in another order."""

    table: RowTable
    seed: int
    shuffle: bool = True

    @property
    def identity(self) -> str:
        return f"{self.table.digest} {self.seed} {self.shuffle}"

    def __len__(self) -> int:
        """Rows of one pass."""
        return len(self.table)

    def place(self, row: int) -> tuple[int, int]:
        """(pass, row of the table)."""
        turn, place = divmod(row, len(self.table))
        return turn, Shuffle.of(len(self.table), self.seed, _PASS, turn)(place) if self.shuffle else place

    def samples(self, row: int) -> list[int]:
        """Numbers of the samples in a row."""
        turn, place = self.place(row)
        mixture = self.table.mixture
        return [mixture.sample(slot, turn) for slot in self.table[place].tolist()]

    def work(self, rows: Sequence[int]) -> list[float] | None:
        """FLOPs of rows, at most; None where the work of samples is not known."""
        work = self.table.arrays.get("work")
        return None if work is None else [float(work[self.place(row)[1]]) for row in rows]

    def row_seed(self, row: int) -> int:
        """Randomness that belongs to this row wherever it is computed; fits a signed 64-bit integer."""
        return mix(self.seed, _ROW, row) >> 1
