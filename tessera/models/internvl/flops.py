"""Floating-point operations of one forward and backward pass, by tower: see `_text.work` for what is counted.

No blank picture of an idle tower is counted.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tessera.core.types import Batch
from tessera.models._text.work import measures_of, text_work
from tessera.models.internvl.config import InternVLConfig


def flops(config: InternVLConfig, batch: Batch) -> float:
    """Of a batch that has not yet gone to the device."""
    return float(sum(part.sum() for part in work(config, measures_of(batch)).values()))


def work(config: InternVLConfig, measures: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Of samples, from their measures."""
    rows = measures["patches"].astype(np.float64)
    return {
        "text": text_work(config.text, measures),
        "vision": _vision(config, rows, measures["patch_pairs"].astype(np.float64)),
    }


def _vision(config: InternVLConfig, rows: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """`rows`: patches, and the class tokens of tiles."""
    vision, hidden = config.vision, config.text.hidden_size
    layers, width = vision.num_hidden_layers, vision.hidden_size
    blocks = layers * (4 * width + 2 * vision.intermediate_size) * width
    projector = (width * vision.spatial_merge_size**2 + hidden) * hidden
    tokens = rows / vision.tile_rows * vision.tile_tokens
    forward: np.ndarray = 2 * rows * blocks + 2 * tokens * projector + 4 * layers * width * pairs
    # Nothing asks for the gradient of pixels, so the first product has one backward product instead of two.
    embed = 2 * rows * vision.patch_values * width
    return 3.0 * forward + 2.0 * embed
