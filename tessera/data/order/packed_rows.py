"""Rows of packed samples: the `RowSource` of indexed data."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tessera.core.batch import IGNORE, Batch
from tessera.core.row_source import RowSource
from tessera.core.sample import BadSample, Encoded, Sample
from tessera.data.index.build import Policy
from tessera.data.index.split import SplitIndex
from tessera.data.media.files import Limits
from tessera.data.media.read import MediaProcessor, read_media
from tessera.data.order.order import Order
from tessera.data.order.step_order import StepOrder
from tessera.data.sources.container import bad_sample, bad_sample_error, excluded
from tessera.errors import TesseraError
from tessera.workers.pool import no_note
from tessera.workers.worker import TooSlow, time_limit

COUNTS = ("samples", "tokens", "trained", "images", "frames", "patches")  # what `Batch.counts` counts


def hole(id: str, length: int) -> Encoded:
    """Return masked tokens that replace an unreadable sample: the same length, no labels, no media."""
    return Encoded(
        id,
        tokens=torch.zeros(length, dtype=torch.int64),
        labels=torch.full((length,), IGNORE, dtype=torch.int64),
        positions=torch.arange(length),
    )


class GuardedRows(RowSource):
    """Make batches by `guarded`, which worker processes call, too. In this process `lost`, the crashes, is empty."""

    def batch(self, rows: Sequence[int]) -> Batch:
        return self.guarded(rows, {}, no_note)

    @abstractmethod
    def guarded(self, rows: Sequence[int], lost: Mapping[int, str], note: Callable[[int], None]) -> Batch: ...


@dataclass(eq=False)
class PackedRows(GuardedRows):
    """Read rows of packed samples. `order` maps row indices to sample indices."""

    index: SplitIndex
    order: Order | StepOrder
    processor: MediaProcessor
    length: int
    limits: Limits
    on_bad_sample: Policy = "skip"
    timeout_s: float | None = None
    hole: Callable[[str, int], Any] = hole  # (id, length) -> replacement of an unreadable sample
    count_names: Sequence[str] = COUNTS  # keys of `Batch.counts`, the same in every batch and on all ranks
    constants: Mapping[str, Tensor] = field(default_factory=dict)  # tensors that are added to every batch
    left_out: Mapping[str, str] = field(default_factory=dict)  # {id of a sample to skip: reason}

    @property
    def bad_count(self) -> int:
        return self.index.bad_count

    @property
    def identity(self) -> str:
        """Return two hashes: one includes file paths; one is of the content alone, so files may be moved."""
        indexes = (self.index.identity, self.index.content)
        return "/".join(hashlib.sha256(f"{index} {self.order.identity}".encode()).hexdigest()[:16] for index in indexes)

    def __len__(self) -> int:
        return len(self.order)

    @property
    def rows_per_step(self) -> int | None:
        return self.order.rows_per_step if isinstance(self.order, StepOrder) else None

    @property
    def bad_samples(self) -> tuple[BadSample, ...]:
        """Return the samples that the index skipped: the first entries of `quarantine.jsonl`."""
        return self.index.bad

    @property
    def decodes_media(self) -> bool:
        """Return whether any sample has images, video or audio. True if the index does not count them."""
        counted = [name for name in ("images", "frames", "patches", "audio_frames") if name in self.index.names]
        return not counted or any(
            bool(np.any(part.columns[name])) for part in self.index.parts if len(part) for name in counted
        )

    def work(self, rows: Sequence[int]) -> list[float] | None:
        return self.order.work(rows)

    def without(self, samples: Mapping[str, str]) -> PackedRows:
        return replace(self, left_out={**self.left_out, **samples})

    def guarded(self, rows: Sequence[int], lost: Mapping[int, str], note: Callable[[int], None]) -> Batch:
        problems: list[BadSample] = []
        encoded = [self.encode(row, lost, note, problems) for row in rows]
        return self.collate(rows, encoded, [self.order.row_seed(row) for row in rows], problems)

    def encode(
        self, row: int, lost: Mapping[int, str], note: Callable[[int], None], problems: list[BadSample]
    ) -> list[Any]:
        """Encode the samples of a row.

        An unreadable sample is replaced by masked tokens and added to `problems`, or raises its error.
        """
        return [self._encode(sample, lost, note, problems) for sample in self.order.samples(row)]

    def collate(
        self, rows: Sequence[int], encoded: list[list[Any]], seeds: Sequence[int], problems: Sequence[BadSample]
    ) -> Batch:
        """Make a micro-batch of encoded rows. `rows`: their indices."""
        batch = self.processor.collate(encoded, self.length).with_tensors(**self.constants)
        return replace(
            batch,
            sample_ids=tuple(item.id for row in encoded for item in row),
            rows=tuple((row, len(items)) for row, items in zip(rows, encoded, strict=True)),
            counts={**dict.fromkeys(self.count_names, 0), **batch.counts},
            seeds=tuple(seeds),
            problems=tuple(problems),
        )

    def _encode(
        self, number: int, lost: Mapping[int, str], note: Callable[[int], None], problems: list[BadSample]
    ) -> Any:
        sample: Sample | None = None
        tokens = self.index.measure("tokens", number)
        try:
            if number in lost:
                sample = self._words_of(number, lost, note)
                raise TesseraError(lost[number], code="data.item-ends-worker")
            for last_try in (False, True):  # try twice: a time-out may be due to a slow file system
                note(number)
                try:
                    with time_limit(self.timeout_s):
                        sample, root = self.index.read(number)
                        if sample.id in self.left_out:
                            problems.append(excluded(sample.id, self.left_out))
                            return self.hole(sample.id, tokens)
                        return self._encode_sample(sample, root, tokens)
                except TooSlow:
                    if last_try:
                        raise
            raise AssertionError("unreachable: the second try returns or raises")
        except (TesseraError, OSError) as error:
            source, row = self.index.locate(number)
            bad = bad_sample(source.location(row) if sample is None else sample.id, error)
            if self.on_bad_sample == "fail":
                raise bad_sample_error(bad, str(source.path)) from None
            problems.append(bad)
            return self.hole(bad.id, tokens)

    def _words_of(self, number: int, lost: Mapping[int, str], note: Callable[[int], None]) -> Sample | None:
        """Read the record of a sample that crashed or hung a worker process, without its media, to report its id.

        `note(~number)` is called first. If reading the record also crashes or hangs the worker, `lost` contains
        `~number` at the next attempt, which returns None.
        """
        if ~number in lost:
            return None
        note(~number)
        with time_limit(self.timeout_s):
            return self.index.read(number)[0]

    def _encode_sample(self, sample: Sample, root: Path, expected: int) -> Any:
        media, sizes = read_media(sample, root, self.limits, self.processor)
        encoded = self.processor.encode(sample, media, sizes)
        if encoded.length != expected:
            raise TesseraError(
                f"a sample has {encoded.length} tokens, {expected} in the index: the data changed since it was indexed",
                code="data.sample-changed",
            )
        return encoded
