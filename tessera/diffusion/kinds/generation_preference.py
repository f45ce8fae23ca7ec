"""Read pairs of images or videos for one caption, a better and a worse one, for `train.task=diffusion_dpo`.

A pair is one sample: two segments of the same size in one row, the better one first. Both have the same caption and the
same images to edit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from tessera.core.batch import Batch
from tessera.core.row_source import RowSource
from tessera.core.sample import MediaSize, Message, Sample
from tessera.data.kinds import RowRequest
from tessera.data.sources.formats import CHOSEN, REJECTED
from tessera.diffusion.kinds.generation import captioned_rows, generation_processor_of
from tessera.diffusion.processor import GenerationProcessor
from tessera.diffusion.samples import EncodedMedia
from tessera.errors import TesseraError


@dataclass
class EncodedMediaPair(EncodedMedia):
    """Hold the better and the worse sample of a pair before packing."""

    answers: tuple[EncodedMedia, ...] = ()


class MediaPairProcessor(GenerationProcessor):
    """Process preference samples, whose last two media are the chosen and the rejected image or video."""

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"media pairs 1 {super().fingerprint}".encode()).hexdigest()

    def whole_media(self, sample: Sample) -> Sequence[int]:
        return super().whole_media(_apart(sample)[0])

    def measure(self, sample: Sample, sizes: Sequence[MediaSize]) -> dict[str, int]:
        first, second = (
            super(MediaPairProcessor, self).measure(answer, _of_one(sizes, side))
            for side, answer in enumerate(_apart(sample))
        )
        _check_alike(first["trained"], second["trained"])
        return {**{name: first[name] + second[name] for name in first}, "samples": 1}

    def encode(
        self, sample: Sample, media: Sequence[Any], sizes: Sequence[MediaSize] | None = None
    ) -> EncodedMediaPair:
        first, second = (
            super(MediaPairProcessor, self).encode(
                answer, _of_one(media, side), None if sizes is None else _of_one(sizes, side)
            )
            for side, answer in enumerate(_apart(sample))
        )
        _check_alike(first.grid, second.grid)
        counts = {name: first.counts[name] + second.counts[name] for name in first.counts}
        return EncodedMediaPair(sample.id, first.length + second.length, counts=counts, answers=(first, second))

    def collate(self, rows: Sequence[Sequence[EncodedMedia]], length: int) -> Batch:
        spread = [
            [answer for item in row for answer in (item.answers if isinstance(item, EncodedMediaPair) else (item,))]
            for row in rows
        ]
        batch = super().collate(spread, length)
        pairs = sum(isinstance(item, EncodedMediaPair) for row in rows for item in row)
        return replace(batch, counts={**batch.counts, "samples": sum(map(len, rows)), "pairs": pairs})

    def check_features(self, facts: Mapping[str, Any], where: str) -> None:
        raise TesseraError(
            "stored features are single samples, not pairs",
            where=where,
            fix="use data files with images and videos in place of the features",
            code="data.features-are-not-pairs",
        )


def _apart(sample: Sample) -> tuple[Sample, Sample]:
    """Return the sample with the better image or video, and the sample with the worse one."""
    *question, better, worse = sample.messages
    if (better.role, worse.role) != (CHOSEN, REJECTED):
        raise TesseraError(
            f"a record must name two images or videos, as {CHOSEN!r} and {REJECTED!r}",
            fix="name both under these keys",
            code="data.not-a-pair",
        )
    first, second = (Sample(sample.id, (*question, Message("assistant", answer.parts))) for answer in (better, worse))
    return first, second


def _of_one(both: Sequence[Any], side: int) -> list[Any]:
    """Return the media of the better or the worse sample. `both`: images to edit, then better and worse media."""
    return [*both[:-2], both[-2 + side]]


def _check_alike(first: Any, second: Any) -> None:
    if first != second:
        raise TesseraError(
            "the two images or videos of a pair have different sizes",
            fix="make pairs of one size, or set data.processor.height and width",
            code="data.pair-sizes-differ",
        )


def build(request: RowRequest) -> RowSource:
    processor = generation_processor_of(request)
    parts = {field.name: getattr(processor, field.name) for field in fields(processor)}
    return captioned_rows(request, MediaPairProcessor(**parts))


KIND = build
