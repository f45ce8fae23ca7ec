"""A batch that nobody has to load: what forecasts and dry runs work on."""

from __future__ import annotations

from dataclasses import replace
from math import isqrt

from tessera.core.types import Batch, Segments
from tessera.models._text.example import with_pictures
from tessera.models.qwen2_5_vl.config import Qwen25VLConfig
from tessera.models.qwen2_5_vl.windows import window_sizes


def example(config: Qwen25VLConfig, tokens: int) -> Batch:
    """One conversation of so many tokens with square pictures of one size, which take about a quarter of them."""
    vision = config.vision
    block = vision.spatial_merge_size**2
    batch = with_pictures(tokens, vision.spatial_merge_size, vision.patch_values)
    windows: list[int] = []
    for patches in batch.segments["vision"].lengths:
        side = isqrt(patches // block)
        windows += [block * size for size in window_sizes(side, side, vision.window)]
    return replace(batch, segments={**batch.segments, "vision.windows": Segments.of(windows)})
