"""Inputs of media encoders: the elements that an encoder reads, and the text positions that its outputs replace.

An element is one input of an encoder: an image patch or an audio frame. A family's processor computes a `MediaLayout`
for each image, video or recording, and makes its elements. The rest follows from the `Stream` in the model's plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tessera.core.batch import Batch, Segments
from tessera.core.model_plan import Stream
from tessera.core.sample import EncodedStream, MediaSize, PartKind, VideoWithSound
from tessera.nn.multimodal import packed_rows


@dataclass(frozen=True, eq=False)
class MediaLayout:
    """Hold how many tokens and encoder inputs (patches or audio frames) an image, video or recording becomes."""

    tokens: tuple[int, ...]  # number of tokens in each run of consecutive placeholder tokens
    lengths: tuple[int, ...]  # number of patches or audio frames in each attention segment (a video frame, a tile)
    # numbers of patches along time, height and width; or number of tiles, of tile rows and of tile columns
    grid: tuple[int, ...] = ()
    windows: tuple[int, ...] = ()  # number of patches in each window, for encoders with window attention
    # output i of the encoder replaces placeholder `token_order[i]` of this medium; None: placeholder i
    token_order: np.ndarray | None = None
    selected: np.ndarray | None = None  # indices of the patches whose features become tokens; None: all
    # [tokens, K]: indices of the features that each token is interpolated from; -1 is a learned embedding of the
    # projector, such as the end of an image row. None: each feature is a token.
    feature_index: np.ndarray | None = None
    feature_weights: np.ndarray | None = None  # [tokens, K]: interpolation weights; None: all 1
    times: tuple[float, ...] = ()  # rope time position of each temporal patch of a video; empty: 0, 1, 2, ...
    timestamps: tuple[str, ...] = ()  # text beside each run of placeholders, such as the time of a video frame
    # layout of the sound track of a video; its runs of placeholders alternate with those of the frames
    sound: MediaLayout | None = None

    def runs(self) -> list[tuple[PartKind | None, int]]:
        """Return the length of each run of placeholder tokens in order. Runs of a sound track are marked "audio"."""
        frames: list[tuple[PartKind | None, int]] = [(None, count) for count in self.tokens]
        sound: list[tuple[PartKind | None, int]] = (
            [("audio", count) for count in self.sound.tokens] if self.sound else []
        )
        return [run for pair in zip_longest(frames, sound) for run in pair if run is not None]


@dataclass(frozen=True)
class MediaStream:
    """Declare which media an encoder reads, its `Stream` in the `ModelPlan`, and the keys of its counts in `measure`.

    An element is a patch or an audio frame. The number of element pairs is the sum of squared segment lengths, to
    which the FLOPs of attention are proportional. `measure` returns both numbers for a sample.
    """

    stream: Stream
    kinds: tuple[PartKind, ...]
    elements: str  # key of the number of elements, such as "patches"
    pairs: str  # key of the number of element pairs within attention segments
    window_pairs: str = ""  # key of the number of element pairs within windows; empty: no window attention

    def count(self, layouts: Iterable[MediaLayout]) -> int:
        return sum(length for layout in layouts for length in layout.lengths)

    def measure(self, layouts: Sequence[MediaLayout]) -> dict[str, int]:
        """Return the number of element pairs of a sample: patches or audio frames that attend to each other."""
        return self._pairs(
            (length for layout in layouts for length in layout.lengths),
            (length for layout in layouts for length in layout.windows),
        )

    def measures_of(self, batch: Batch) -> dict[str, int]:
        """Return how many elements a batch has and how many pairs attend to each other, by columns of the index."""
        whole, windows = batch.segments.get(self.stream.segments), batch.segments.get(self.stream.windows)
        pairs = self._pairs(() if whole is None else whole.lengths, () if windows is None else windows.lengths)
        return {self.elements: self.stream.elements(batch), **pairs}

    def _pairs(self, lengths: Iterable[int], windows: Iterable[int]) -> dict[str, int]:
        pairs = {self.pairs: sum(length**2 for length in lengths)}
        return {**pairs, self.window_pairs: sum(length**2 for length in windows)} if self.window_pairs else pairs


MediaStreams = Mapping[str, MediaStream]  # keys: names of streams in the plan


def media_size(media: Any) -> MediaSize:
    """Return the size of a PIL image, frames [F, H, W, 3], sound [samples], both in a video, or codes [F, K]."""
    if isinstance(media, VideoWithSound):
        return replace(media_size(media.frames), samples=len(media.sound))
    if isinstance(media, Image.Image):
        return MediaSize(*media.size)
    if np.ndim(media) == 1:
        return MediaSize(0, 0, 0, samples=len(media))
    if np.ndim(media) == 2:
        return MediaSize(0, 0, len(media))
    frames, height, width, _ = np.shape(media)
    return MediaSize(width, height, frames)


def token_runs(layouts: Sequence[MediaLayout]) -> list[int]:
    """Return the length of each run of consecutive placeholder tokens, over all media of a sample."""
    return [count for layout in layouts for _, count in layout.runs()]


Runs = Sequence[tuple[int, int]]  # start and length of each run of consecutive placeholder tokens
# (layout, runs of placeholder tokens, encoder inputs) of one image, video or recording
EncodedMedium = tuple[MediaLayout, Runs, Mapping[str, Tensor]]


def encode_stream(media: Sequence[EncodedMedium], dim: int = 0) -> EncodedStream:
    """Return the input of an encoder for the media of a sample. `dim`: dimension of elements, see `Stream`."""
    slots, selected, indices, elements, features = [], [], [], 0, 0
    for layout, runs, _ in media:
        positions = torch.cat([torch.empty(0).long(), *(torch.arange(start, start + count) for start, count in runs)])
        slots.append(positions if layout.token_order is None else positions[torch.from_numpy(layout.token_order)])
        if layout.selected is not None:
            selected.append(torch.from_numpy(layout.selected) + elements)
        if layout.feature_index is not None:
            index = _shift_features(torch.from_numpy(layout.feature_index), features)
            weights = layout.feature_weights
            indices.append((index, torch.ones(index.shape) if weights is None else torch.from_numpy(weights)))
        elements += sum(layout.lengths)
        features += sum(layout.lengths) if layout.selected is None else len(layout.selected)
    layouts = [layout for layout, _, _ in media]
    return EncodedStream(
        {name: _joined([tensors[name] for _, _, tensors in media], dim) for name in media[0][2]},
        lengths=tuple(length for layout in layouts for length in layout.lengths),
        slots=torch.cat(slots),
        windows=tuple(length for layout in layouts for length in layout.windows),
        selected=torch.cat(selected) if selected else None,
        index=packed_rows([index for index, _ in indices]) if indices else None,
        weights=packed_rows([weights for _, weights in indices]) if indices else None,
    )


def pack_stream(stream: Stream, parts: Sequence[tuple[EncodedStream, int]]) -> Batch:
    """Return the tensors and segments of an encoder's input in a batch.

    `parts`: the input of each sample that has media, and the index of the sample's first token in the batch.
    """
    inputs = [part for part, _ in parts]
    first = inputs[0]
    tensors = {name: torch.cat([part.tensors[name] for part in inputs], stream.dim) for name in first.tensors}
    if stream.slots:
        tensors[stream.slots] = torch.cat([part.slots + start for part, start in parts])
    segments = {stream.segments: Segments.of([length for part in inputs for length in part.lengths])}
    if first.windows:
        segments[stream.windows] = Segments.of([length for part in inputs for length in part.windows])
    if first.selected is not None:
        starts = _starts(sum(part.lengths) for part in inputs)
        selected = [part.selected + at for part, at in zip(inputs, starts, strict=True) if part.selected is not None]
        tensors[stream.selection("patches")] = torch.cat(selected)
    if first.index is not None:
        starts = _starts(sum(part.lengths) if part.selected is None else len(part.selected) for part in inputs)
        shifted = [_shift_features(p.index, at) for p, at in zip(inputs, starts, strict=True) if p.index is not None]
        index = packed_rows(shifted) + 1  # index 0 is the learned embedding of the projector
        tensors[stream.selection("index")] = index if index.shape[1] > 1 else index.flatten()
        if index.shape[1] > 1:
            weights = [part.weights for part in inputs if part.weights is not None]
            tensors[stream.selection("weights")] = packed_rows(weights)
    return Batch(tensors, segments)


def _starts(counts: Iterable[int]) -> list[int]:
    return [int(start) for start in np.cumsum([0, *counts])[:-1]]


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return torch.cat(list(parts), dim) if len(parts) > 1 else parts[0]


def _shift_features(index: Tensor, features: int) -> Tensor:
    """Add `features`, the number of earlier features in the batch, to all indices except -1 (the learned embedding)."""
    return torch.where(index < 0, index, index + features)
