"""Pairs of images or videos for one caption, the better and the worse: what `train.task=diffusion_dpo` learns from.

A pair is one sample: two segments of one size in one row, the better one first; captions and images to edit
are those of both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from tessera.core.batch import Batch
from tessera.core.row_source import RowSource
from tessera.core.sample import MediaSize, Message, PartKind, Sample
from tessera.data.kinds import RowRequest
from tessera.data.kinds.generation import build as build_generation
from tessera.data.media.read import CaptionProcessor, KeepsMediaWhole
from tessera.data.media.video_frames import VideoSampling
from tessera.data.sources.formats import CHOSEN, REJECTED
from tessera.errors import TesseraError


@dataclass
class EncodedMediaPair:
    """Hold both samples of a pair, not yet packed."""

    id: str
    length: int
    counts: dict[str, int]
    answers: tuple[Any, ...]


@dataclass(frozen=True)
class MediaPairProcessor:
    """Wrap a processor of images and videos for samples that end with a chosen and a rejected one."""

    inner: CaptionProcessor

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"media pairs 1 {self.inner.fingerprint}".encode()).hexdigest()

    @property
    def sampling(self) -> VideoSampling:
        return self.inner.sampling

    def target(self, kind: PartKind, size: MediaSize) -> tuple[int, int] | None:
        return self.inner.target(kind, size)

    def whole_media(self, sample: Sample) -> Sequence[int]:
        if not isinstance(self.inner, KeepsMediaWhole):
            return ()
        return self.inner.whole_media(_apart(sample)[0])

    def measure(self, sample: Sample, sizes: Sequence[MediaSize]) -> dict[str, int]:
        measures = [self.inner.measure(one, _of_one(sizes, side)) for side, one in enumerate(_apart(sample))]
        _check_alike(*(one["trained"] for one in measures))
        return {**{name: sum(one[name] for one in measures) for name in measures[0]}, "samples": 1}

    def encode(
        self, sample: Sample, media: Sequence[Any], sizes: Sequence[MediaSize] | None = None
    ) -> EncodedMediaPair:
        answers: tuple[Any, ...] = tuple(
            self.inner.encode(answer, _of_one(media, side), None if sizes is None else _of_one(sizes, side))
            for side, answer in enumerate(_apart(sample))
        )
        _check_alike(*(answer.grid for answer in answers))
        counts = {name: sum(answer.counts[name] for answer in answers) for name in answers[0].counts}
        return EncodedMediaPair(sample.id, sum(answer.length for answer in answers), counts=counts, answers=answers)

    def collate(self, rows: Sequence[Sequence[Any]], length: int) -> Batch:
        spread = [
            [one for item in row for one in (item.answers if isinstance(item, EncodedMediaPair) else (item,))]
            for row in rows
        ]
        batch = self.inner.collate(spread, length)
        pairs = sum(isinstance(item, EncodedMediaPair) for row in rows for item in row)
        return replace(batch, counts={**batch.counts, "samples": sum(map(len, rows)), "pairs": pairs})

    def hole(self, id: str, length: int, like: Mapping[str, Tensor] | None = None) -> Any:
        return self.inner.hole(id, length, like)

    def check_features(self, facts: Mapping[str, Any], where: str) -> None:
        raise TesseraError(
            "features hold single samples, not pairs",
            where=where,
            fix="name the images and videos",
            code="data.features-are-not-pairs",
        )

    def save(self, folder: Path) -> None:
        self.inner.save(folder)


def _apart(sample: Sample) -> tuple[Sample, Sample]:
    """Return the sample with the better image or video, and with the worse one."""
    *question, better, worse = sample.messages
    if (better.role, worse.role) != (CHOSEN, REJECTED):
        raise TesseraError(
            f"no pair: a record names two images or videos, {CHOSEN!r} and {REJECTED!r}", code="data.not-a-pair"
        )
    first, second = (Sample(sample.id, (*question, Message("assistant", one.parts))) for one in (better, worse))
    return first, second


def _of_one(both: Sequence[Any], side: int) -> list[Any]:
    """Return what belongs to one of a pair: images to edit come first, then the better and the worse."""
    return [*both[:-2], both[-2 + side]]


def _check_alike(first: Any, second: Any) -> None:
    if first != second:
        raise TesseraError(
            "the two of a pair differ in size, and are compared with one noise",
            fix="make pairs of one size, or set data.processor.height and width",
            code="data.pair-sizes-differ",
        )


def build(request: RowRequest) -> RowSource:
    processor = request.processor
    if not isinstance(processor, CaptionProcessor):
        raise TesseraError(
            f"{type(processor).__name__} does not serve pairs of images and videos",
            where="data.kind=generation_preference",
            fix="use a family that generates images or videos, such as wan; or data.kind=preference",
            code="data.kind-needs-generation-model",
        )
    return build_generation(replace(request, processor=MediaPairProcessor(processor)))


KIND = build
