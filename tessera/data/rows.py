"""Rows of packed conversations: the data set as the loader sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from tessera.core.errors import TesseraError
from tessera.core.types import IGNORE, Batch, Encoded, Sample
from tessera.data.forms import RowError
from tessera.data.images import Limits
from tessera.data.index import ChatProcessor, Policy, SplitIndex
from tessera.data.media import decode
from tessera.data.order import Order

# Always reported, so that ranks agree on the names.
COUNTS = ("samples", "tokens", "trained", "images", "frames", "patches")


class ChatRows:
    """A `RowSource`. Row r belongs to epoch r // len(self); what it holds depends on its number alone."""

    def __init__(
        self,
        index: SplitIndex,
        order: Order,
        processor: ChatProcessor,
        *,
        length: int,
        limits: Limits,
        on_bad_sample: Policy = "skip",
    ) -> None:
        self.index = index
        self.order = order
        self.processor = processor
        self.length = length
        self.limits = limits
        self.on_bad_sample = on_bad_sample
        self._tokens = index.column("tokens")
        self._epoch: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.order)

    @property
    def bad_samples(self) -> tuple[tuple[str, str], ...]:
        """(id, why) of samples that the index left out; the quarantine list begins with them."""
        return self.index.bad

    def samples(self, row: int) -> np.ndarray:
        """Numbers of the samples in a row."""
        epoch, at = divmod(row, len(self.order))
        if self._epoch[0] != epoch:
            self._epoch = (epoch, self.order.epoch(epoch))
        return self.order.packs[int(self._epoch[1][at])]

    def batch(self, rows: Sequence[int]) -> Batch:
        problems: list[tuple[str, str]] = []
        encoded = [[self._encode(int(sample), problems) for sample in self.samples(row)] for row in rows]
        batch = self.processor.collate(encoded, self.length)
        return replace(
            batch,
            sample_ids=tuple(item.id for row in encoded for item in row),
            counts={**dict.fromkeys(COUNTS, 0), **batch.counts},
            seeds=tuple(self.order.row_seed(row) for row in rows),
            problems=tuple(problems),
        )

    def _encode(self, number: int, problems: list[tuple[str, str]]) -> Encoded:
        sample: Sample | None = None
        promised = int(self._tokens[number])
        try:
            sample, root = self.index.read(number)
            return self._encode_whole(sample, root, promised)
        except (TesseraError, RowError, OSError) as error:
            source, row = self.index.locate(number)
            id = source.place(row) if sample is None else sample.id
            reason = error.what if isinstance(error, TesseraError) else str(error)
            if self.on_bad_sample == "fail":
                raise TesseraError(
                    f"sample {id} cannot be used: {reason}",
                    where=str(source.path),
                    fix="mend the data, or set data.on_bad_sample=skip",
                ) from None
            problems.append((id, reason))
            return _hole(id, promised)

    def _encode_whole(self, sample: Sample, root: Path, promised: int) -> Encoded:
        media = [decode(part, root, self.limits, self.processor.sampling) for part in sample.media()]
        encoded = self.processor.encode(sample, media)
        if len(encoded.tokens) != promised:
            raise TesseraError(
                f"{len(encoded.tokens)} tokens where headers promised {promised}: the data changed since it was indexed"
            )
        return encoded


def _hole(id: str, length: int) -> Encoded:
    """Takes the place of a sample that could not be decoded: the same length, nothing to train on, no media."""
    return Encoded(
        id,
        tokens=torch.zeros(length, dtype=torch.int64),
        labels=torch.full((length,), IGNORE, dtype=torch.int64),
        positions=torch.arange(length),
    )
