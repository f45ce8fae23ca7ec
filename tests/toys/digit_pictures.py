"""A data kind of one's own: rows of 16 scans of digits, from numbers alone."""

from __future__ import annotations

from collections.abc import Sequence

from tessera.core.batch import Batch
from tessera.core.row_source import RowSource
from tessera.data.kinds import RowRequest
from tessera.runtime.rng import derive
from tests.toys.digits import load_digits

ROW = 16


class DigitPictures(RowSource):
    def __init__(self, seed: int) -> None:
        self.pictures = load_digits()[0]
        self.seed = seed

    def __len__(self) -> int:
        return len(self.pictures) // ROW

    def batch(self, rows: Sequence[int]) -> Batch:
        numbers = [(row % len(self)) * ROW + i for row in rows for i in range(ROW)]
        return Batch(
            {"clean": self.pictures[numbers]},
            sample_ids=tuple(f"digit-{n}" for n in numbers),
            counts={"samples": len(numbers), "pixels": 64 * len(numbers)},
            seeds=tuple(derive(self.seed, "row", row) for row in rows),
        )


def KIND(request: RowRequest) -> DigitPictures:
    return DigitPictures(request.seed)
