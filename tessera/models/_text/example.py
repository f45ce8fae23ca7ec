"""A micro-batch that nobody has to load: words, and pictures among them."""

from __future__ import annotations

from math import isqrt

import torch

from tessera.core.types import Batch, Segments

PICTURES = 16  # as many as ranks commonly deal pictures among


def with_pictures(tokens: int, merge: int, patch_values: int) -> Batch:
    """One conversation of so many tokens with square pictures of one size, which take about a quarter of them."""
    side = max(1, isqrt(tokens // (4 * PICTURES)))
    pictures = max(1, min(PICTURES, tokens // (4 * side * side)))
    patches = (side * merge) ** 2
    count = torch.arange(tokens)
    place = torch.arange(patches)
    positions = torch.stack([place // (side * merge), place % (side * merge)], dim=1)
    return Batch(
        {
            "tokens": torch.zeros(tokens, dtype=torch.int64),
            "labels": torch.zeros(tokens, dtype=torch.int64),
            "positions": count.expand(3, -1).clone(),
            "pixels": torch.zeros(pictures * patches, patch_values),
            "patch_positions": positions.repeat(pictures, 1),
            "media_slots": count[: pictures * side * side].clone(),
        },
        {"text": Segments.of([tokens]), "vision": Segments.of([patches] * pictures)},
        sample_ids=("example",),
        seeds=(0,),
    )
