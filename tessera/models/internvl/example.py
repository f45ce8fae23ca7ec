"""A batch that nobody has to load: what forecasts and dry runs work on."""

from __future__ import annotations

import torch

from tessera.core.types import Batch, Segments
from tessera.models.internvl.config import InternVLConfig


def example(config: InternVLConfig, tokens: int) -> Batch:
    """One conversation of so many tokens; about a quarter of them are those of tiles. Of too few there is no tile."""
    vision = config.vision
    tiles = max(tokens // (4 * vision.tile_tokens), 1 if tokens > vision.tile_tokens else 0)
    count = torch.arange(tokens)
    words = torch.zeros(tokens, dtype=torch.int64)
    tensors = {"tokens": words, "labels": words.clone(), "positions": count}
    segments = {"text": Segments.of([tokens])}
    if tiles:
        rows = torch.arange(tiles * vision.tile_rows)
        tensors |= {
            "pixels": torch.zeros(len(rows), vision.patch_values),
            "patch_index": rows % vision.tile_rows,
            "media_patches": rows.view(tiles, -1)[:, 1:].flatten(),
            "media_slots": count[: tiles * vision.tile_tokens].clone(),
        }
        segments["vision"] = Segments.of([vision.tile_rows] * tiles)
    return Batch(tensors, segments, sample_ids=("example",), seeds=(0,))
