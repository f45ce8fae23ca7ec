"""How images and videos become visual tokens, and the tensors that carry them from a sample to a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tessera.core.batch import Segments
from tessera.core.sample import MediaSize


@dataclass(frozen=True, eq=False)
class MediaLayout:
    """Hold the tokens and patches of one image or video. All of it follows from the size of the media."""

    tokens: tuple[int, ...]  # visual tokens in each run of its placeholder
    lengths: tuple[int, ...]  # patches of each attention segment: frames, tiles
    grid: tuple[int, ...] = ()  # patches along time, height and width, or what else a family counts
    windows: tuple[int, ...] = ()  # patches of each window, for encoders with window attention
    token_order: np.ndarray | None = None  # its tokens in the order of the encoder's output; None: as in the text
    kept_patches: np.ndarray | None = None  # patches whose features become tokens; None: all
    # [tokens, K]: features that each token is interpolated from; -1 is the projector's own embedding. None: each
    # feature is a token.
    feature_index: np.ndarray | None = None
    feature_weights: np.ndarray | None = None  # [tokens, K]: interpolation weights; None: all 1
    interval: float = 1.0  # positions from one step along time to the next
    timestamps: tuple[str, ...] = ()  # text written beside each run, for families that do so


def media_size(media: Any) -> MediaSize:
    """Return the size of a PIL image or of frames [F, H, W, 3]."""
    if isinstance(media, Image.Image):
        return MediaSize(*media.size)
    frames, height, width, _ = np.shape(media)
    return MediaSize(width, height, frames)


def token_runs(layouts: Sequence[MediaLayout]) -> list[int]:
    """Return the number of visual tokens in each run of placeholders, over all media of a sample."""
    return [count for layout in layouts for count in layout.tokens]


def media_tensors(layouts: Sequence[MediaLayout], spans: Sequence[tuple[int, int]]) -> dict[str, Tensor]:
    """Return the slots of a sample's visual tokens and the grouping of its patches.

    `spans`: first token and number of tokens of each run of visual tokens.
    """
    remaining = iter(spans)
    slots, kept, indices, patches, features = [], [], [], 0, 0
    for layout in layouts:
        runs = [next(remaining) for _ in layout.tokens]
        positions = torch.cat([torch.arange(start, start + count) for start, count in runs])
        slots.append(positions if layout.token_order is None else positions[torch.from_numpy(layout.token_order)])
        if layout.kept_patches is not None:
            kept.append(torch.from_numpy(layout.kept_patches) + patches)
        if layout.feature_index is not None:
            index = _shift_features(torch.from_numpy(layout.feature_index), features)
            weights = layout.feature_weights
            indices.append((index, torch.ones(index.shape) if weights is None else torch.from_numpy(weights)))
        patches += sum(layout.lengths)
        features += sum(layout.lengths) if layout.kept_patches is None else len(layout.kept_patches)
    tensors = {
        "slots": torch.cat(slots),
        "lengths": torch.tensor([n for layout in layouts for n in layout.lengths]),
        "grids": torch.tensor([layout.grid for layout in layouts]),
        "features": torch.tensor([features]),
    }
    if any(layout.windows for layout in layouts):
        tensors["windows"] = torch.tensor([n for layout in layouts for n in layout.windows])
    if indices:
        tensors["index"] = _concatenate_padded([index for index, _ in indices])
        tensors["weights"] = _concatenate_padded([weights for _, weights in indices])
    if kept:
        tensors["kept"] = torch.cat(kept)
    return tensors


def collate_media(
    samples: Sequence[dict[str, Tensor]], tensors: dict[str, Tensor], segments: dict[str, Segments]
) -> None:
    """Concatenate the media of samples and add them to the tensors and segments of a batch."""
    for name in samples[0]:
        if name.startswith(("pixels", "patch_")):
            tensors[name] = torch.cat([media[name] for media in samples])
    segments["vision"] = Segments.of(torch.cat([media["lengths"] for media in samples]).tolist())
    if "windows" in samples[0]:
        segments["vision.windows"] = Segments.of(torch.cat([media["windows"] for media in samples]).tolist())
    if "kept" in samples[0]:
        starts = np.cumsum([0, *(int(media["lengths"].sum()) for media in samples)])
        tensors["media_patches"] = torch.cat([m["kept"] + int(at) for m, at in zip(samples, starts[:-1], strict=True)])
    if "index" in samples[0]:
        starts = np.cumsum([0, *(int(media["features"]) for media in samples)])
        shifted = [_shift_features(m["index"], int(at)) for m, at in zip(samples, starts[:-1], strict=True)]
        index = _concatenate_padded(shifted) + 1  # the projector's own embedding comes first
        tensors["media_index"] = index if index.shape[1] > 1 else index.flatten()
        if index.shape[1] > 1:
            tensors["media_weights"] = _concatenate_padded([media["weights"] for media in samples])


def _shift_features(index: Tensor, features: int) -> Tensor:
    """Add the number of earlier features to the indices; -1, the projector's own embedding, stays."""
    return torch.where(index < 0, index, index + features)


def _concatenate_padded(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate [N, K] tensors of different K, padded with zeros to the widest."""
    width = max(part.shape[1] for part in parts)
    return torch.cat([torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in parts])
