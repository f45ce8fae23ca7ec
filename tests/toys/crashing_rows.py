"""A data kind whose decoder crashes: one picture of each split ends whichever process reads it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tessera.core.batch import Batch
from tessera.core.row_source import RowSource
from tessera.data.kinds import RowRequest
from tests.toys.digit_pictures import KIND as DIGITS

DEADLY = 1  # row of each pass


class CrashingRows(RowSource):
    decodes_media = True

    def __init__(self, request: RowRequest) -> None:
        self.inner = DIGITS(request)
        self.home = os.getpid()

    def __len__(self) -> int:
        return len(self.inner)

    def batch(self, rows: Sequence[int]) -> Batch:
        return self.guarded(rows, {}, lambda _: None)

    def guarded(self, rows: Sequence[int], lost: Mapping[int, str], note: Callable[[int], None]) -> Batch:
        for row in rows:
            if row % len(self) in lost:
                continue
            note(row % len(self))
            assert os.getpid() != self.home, "a decoder runs in the training process"
            if row % len(self) == DEADLY:
                os.kill(os.getpid(), signal.SIGSEGV)
        return replace(self.inner.batch(rows), problems=tuple((f"row {row}", why) for row, why in lost.items()))


def KIND(request: RowRequest) -> CrashingRows:
    return CrashingRows(request)
