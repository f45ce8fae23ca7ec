"""Rows of packed conversations: the data set as the loader sees it."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from tessera.core.errors import TesseraError
from tessera.core.types import IGNORE, Batch, Encoded, Sample
from tessera.data.index.build import Policy
from tessera.data.index.split import SplitIndex
from tessera.data.media.images import Limits
from tessera.data.media.read import read_media
from tessera.data.order.order import Order
from tessera.data.processor import ChatProcessor
from tessera.data.sources.forms import RowError
from tessera.data.time_limit import time_limit

# Always reported, so that ranks agree on the names.
COUNTS = ("samples", "tokens", "trained", "images", "frames", "patches")


class ChatRows:
    """A `RowSource`, weighed and guarded. What row r holds depends on its number alone."""

    def __init__(
        self,
        index: SplitIndex,
        order: Order,
        processor: ChatProcessor,
        *,
        length: int,
        limits: Limits,
        on_bad_sample: Policy = "skip",
        timeout_s: float | None = None,
    ) -> None:
        self.index = index
        self.order = order
        self.processor = processor
        self.length = length
        self.limits = limits
        self.on_bad_sample = on_bad_sample
        self.timeout_s = timeout_s
        self.left_out: dict[str, str] = {}  # samples to pass over, by name, with the reason

    @property
    def bad_count(self) -> int:
        return self.index.bad_count

    @property
    def identity(self) -> str:
        """Changes whenever a row would hold other samples than before."""
        return hashlib.sha256(f"{self.index.identity} {self.order.identity}".encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self.order)

    @property
    def bad_samples(self) -> tuple[tuple[str, str], ...]:
        """(id, why) of samples that the index left out; the quarantine list begins with them."""
        return self.index.bad

    @property
    def decodes_media(self) -> bool:
        """Whether any sample has media. Where a processor does not count them, it may have some."""
        counted = [name for name in ("images", "frames", "patches") if name in self.index.names]
        return not counted or any(
            bool(np.any(part.columns[name])) for part in self.index.parts if len(part) for name in counted
        )

    def work(self, rows: Sequence[int]) -> list[float]:
        return self.order.work(rows) or [1.0] * len(rows)

    def without(self, samples: Mapping[str, str]) -> ChatRows:
        found = copy.copy(self)
        found.left_out = {**self.left_out, **samples}
        return found

    def batch(self, rows: Sequence[int]) -> Batch:
        return self.guarded(rows, {}, lambda _: None)

    def guarded(self, rows: Sequence[int], lost: Mapping[int, str], note: Callable[[int], None]) -> Batch:
        problems: list[tuple[str, str]] = []
        encoded = [[self._encode(sample, lost, note, problems) for sample in self.order.samples(row)] for row in rows]
        batch = self.processor.collate(encoded, self.length)
        return replace(
            batch,
            sample_ids=tuple(item.id for row in encoded for item in row),
            rows=tuple((row, len(items)) for row, items in zip(rows, encoded, strict=True)),
            counts={**dict.fromkeys(COUNTS, 0), **batch.counts},
            seeds=tuple(self.order.row_seed(row) for row in rows),
            problems=tuple(problems),
        )

    def _encode(
        self, number: int, lost: Mapping[int, str], note: Callable[[int], None], problems: list[tuple[str, str]]
    ) -> Encoded:
        sample: Sample | None = None
        try:
            if number in lost:
                sample = self._words_of(number, lost, note)
                raise TesseraError(lost[number])
            note(number)
            with time_limit(self.timeout_s):
                sample, root = self.index.read(number)
                if sample.id in self.left_out:
                    problems.append((sample.id, self.left_out[sample.id]))
                    return _hole(sample.id, self.index.measure("tokens", number))
                return self._encode_whole(sample, root, self.index.measure("tokens", number))
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
            return _hole(id, self.index.measure("tokens", number))

    def _words_of(self, number: int, lost: Mapping[int, str], note: Callable[[int], None]) -> Sample | None:
        """A lost sample without its media, for its name. If the row itself is what kills its reader, that is noted as
        something else, so that it is not tried for ever."""
        if ~number in lost:
            return None
        note(~number)
        with time_limit(self.timeout_s):
            return self.index.read(number)[0]

    def _encode_whole(self, sample: Sample, root: Path, promised: int) -> Encoded:
        media, sizes = read_media(sample, root, self.limits, self.processor)
        encoded = self.processor.encode(sample, media, sizes)
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
