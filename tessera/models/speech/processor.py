"""Samples with speech as codes, and their packing: the base class of processors of families that speak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from tessera.core.batch import IGNORE, Batch
from tessera.core.sample import Encoded, EncodedStream, MediaSize, PartKind, Sample
from tessera.errors import TesseraError
from tessera.models.processing.chat import ChatSpan
from tessera.models.processing.conversation import ConversationProcessor
from tessera.models.processing.streams import MediaLayout
from tessera.models.speech.family import CODED_FRAMES, coded_positions
from tessera.nn.codes import CODED, CODES, NEXT_CODES


@dataclass
class SpokenSample(Encoded):
    """Hold a sample with speech after tokenising. `labels` are those of the main head."""

    codes: Tensor = field(default_factory=lambda: torch.empty(0, 0))  # [K, L] read at each position; IGNORE: none
    targets: Tensor = field(default_factory=lambda: torch.empty(0, 0))  # [K, L] codes of frames to predict, or IGNORE


@dataclass(frozen=True, eq=False)
class SpeechProcessor(ConversationProcessor):
    """Turn conversations with speech as codes into batches."""

    axes: ClassVar[int] = 1
    reads_all_speech: ClassVar[bool] = True  # True: speech of all roles is read as codes; False: only of trained roles

    sizes: tuple[int, ...]  # number of codes of each codebook

    @property
    def codebooks(self) -> int:
        """Return the number of codes in a frame."""
        return len(self.sizes)

    def spoken(self, encoded: Encoded, frames: Sequence[np.ndarray]) -> SpokenSample:
        """Return a sample with its codes. `frames`: speech of all its parts, [frames, codebooks] each."""
        raise AssertionError("a family with codes among the tokens of a conversation defines this")

    def layout(self, kind: PartKind, size: MediaSize) -> MediaLayout:
        return MediaLayout((size.frames,), ())

    def measure(self, sample: Sample, sizes: Sequence[MediaSize]) -> dict[str, int]:
        measures = super().measure(sample, sizes)
        self.frames(sample)
        return {**measures, CODED_FRAMES: measures["trained"]}

    def frames(self, sample: Sample) -> list[np.ndarray]:
        """Return the codes of all parts of speech of a sample."""
        return [checked_frames(part.value, self.sizes) for part in sample.media() if part.kind == "codes"]

    def _encode(
        self,
        sample: Sample,
        media: Sequence[Any],
        sizes: Sequence[MediaSize],
        layouts: Sequence[MediaLayout],
        spans: Sequence[ChatSpan],
    ) -> SpokenSample:
        return self.spoken(super()._encode(sample, media, sizes, layouts, spans), self.frames(sample))

    def _streams(
        self, sample: Sample, media: Sequence[Any], layouts: Sequence[MediaLayout], spans: Sequence[tuple[int, int]]
    ) -> dict[str, EncodedStream]:
        return {}  # codes are read in the main sequence

    def collate(self, rows: Sequence[Sequence[Encoded]], length: int) -> Batch:
        following = packed_codes(rows, [length] * len(rows), len(self.sizes), "targets", ahead=1)
        batch = super().collate(rows, length)
        return batch.with_tensors(**{NEXT_CODES: following, CODED: coded_positions(following)})

    def _pack(self, rows: Sequence[Sequence[Encoded]], lengths: Sequence[int], whole: bool = False) -> Batch:
        batch = super()._pack(rows, lengths, whole)
        return batch.with_tensors(**{CODES: packed_codes(rows, lengths, len(self.sizes), "codes")})


def checked_frames(codes: Any, sizes: Sequence[int]) -> np.ndarray:
    """Return the codes of a recording, int64 [frames, codebooks]. Raise if they do not fit the model's codebooks."""
    frames = np.asarray(codes)
    if frames.ndim != 2 or frames.dtype.kind not in "iu" or not len(frames):
        raise TesseraError(
            f"codes of speech must be integers [frames, codebooks], not {frames.dtype} {frames.shape}",
            code="media.wrong-array",
        )
    if frames.shape[1] != len(sizes):
        raise TesseraError(
            f"each frame has {frames.shape[1]} codes, and the model has {len(sizes)} codebooks",
            fix="encode the recordings with the codec of this model: tessera data features",
            code="data.other-codebooks",
        )
    outside = (frames < 0) | (frames >= np.asarray(sizes))
    if outside.any():
        frame, codebook = (int(number) for number in np.argwhere(outside)[0])
        raise TesseraError(
            f"frame {frame} has the code {int(frames[frame, codebook])} in codebook {codebook}, whose codes are 0 to "
            f"{sizes[codebook] - 1}: codecs write no other codes, and control and padding codes are no speech",
            fix="encode the recordings with the codec of this model: tessera data features",
            code="data.other-codebooks",
        )
    return frames.astype(np.int64)


def packed_codes(
    rows: Sequence[Sequence[Encoded]], lengths: Sequence[int], codebooks: int, name: str, ahead: int = 0
) -> Tensor:
    """Return the codes of all samples of a batch, [codebooks, T]. `name`: field of `SpokenSample`. `ahead`: number of
    positions by which the codes are moved ahead inside each sample."""
    packed = torch.full((codebooks, sum(lengths)), IGNORE, dtype=torch.int64)
    start = 0
    for row, length in zip(rows, lengths, strict=True):
        at = start
        for sample in row:
            size = len(sample.tokens)
            if isinstance(sample, SpokenSample):
                packed[:, at : at + size - ahead] = getattr(sample, name)[:, ahead:]
            at += size
        start += length
    return packed
