"""Floating-point operations of one forward and backward pass, by tower: see `_text.work` for what is counted.

No blank picture of an idle tower is counted, and no block whose features nobody reads.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tessera.core.types import Batch
from tessera.models._text.work import measures_of, text_work
from tessera.models.llava.config import LlavaConfig


def flops(config: LlavaConfig, batch: Batch) -> float:
    """Of a batch that has not yet gone to the device."""
    return float(sum(part.sum() for part in work(config, measures_of(batch)).values()))


def work(config: LlavaConfig, measures: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Of samples, from their measures."""
    patches = measures["patches"].astype(np.float64)
    return {
        "text": text_work(config.text, measures),
        "vision": _vision(config, patches, measures["patch_pairs"].astype(np.float64)),
    }


def _vision(config: LlavaConfig, patches: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    vision, hidden = config.vision, config.text.hidden_size
    width = vision.hidden_size
    blocks = config.blocks_read * (4 * width + 2 * vision.intermediate_size) * width
    features = patches / vision.patches * config.features
    forward: np.ndarray = (
        2 * patches * blocks + 2 * features * hidden * (width + hidden) + 4 * config.blocks_read * width * pairs
    )
    # Nothing asks for the gradient of pixels, so the first product has one backward product instead of two.
    embed = 2 * patches * vision.patch_values * width
    return 3.0 * forward + 2.0 * embed
