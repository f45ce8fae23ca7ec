"""A batch that nobody has to load: what forecasts and dry runs work on."""

from __future__ import annotations

from math import isqrt

import torch

from tessera.core.types import Batch, Segments
from tessera.data.patches import block_positions
from tessera.models.glm4v.config import Glm4vConfig
from tessera.models.glm4v.positions import between_entries

PICTURES = 16  # as many as ranks commonly deal pictures among


def example(config: Glm4vConfig, tokens: int) -> Batch:
    """One conversation of so many tokens with square pictures of one size, which take about a quarter of them."""
    merge = config.vision.spatial_merge_size
    side = max(1, isqrt(tokens // (4 * PICTURES)))
    pictures = max(1, min(PICTURES, tokens // (4 * side * side)))
    patches = (side * merge) ** 2
    count = torch.arange(tokens)
    places = block_positions(side * merge, side * merge, merge)
    index, weights = between_entries(places, side * merge, side * merge, config.vision.table_side)
    return Batch(
        {
            "tokens": torch.zeros(tokens, dtype=torch.int64),
            "labels": torch.zeros(tokens, dtype=torch.int64),
            "positions": count.expand(3, -1).clone(),
            "pixels": torch.zeros(pictures * patches, config.vision.patch_values),
            "patch_positions": torch.from_numpy(places).repeat(pictures, 1),
            "patch_index": torch.from_numpy(index).repeat(pictures, 1),
            "patch_weights": torch.from_numpy(weights).repeat(pictures, 1),
            "media_slots": count[: pictures * side * side].clone(),
        },
        {"text": Segments.of([tokens]), "vision": Segments.of([patches] * pictures)},
        sample_ids=("example",),
        seeds=(0,),
    )
