"""Floating-point operations of one forward and backward pass, by tower: see `_text.work` for what is counted.

No blank picture of an idle tower is counted, and no block whose features nobody reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from tessera.core.types import FULL, Batch, Training
from tessera.models._text.work import measures_of, text_work
from tessera.models.llava.config import LlavaConfig


def flops(config: LlavaConfig, batch: Batch, training: Training = MappingProxyType({})) -> float:
    """Of a batch that has not yet gone to the device."""
    return float(sum(part.sum() for part in work(config, measures_of(batch), training).values()))


def work(
    config: LlavaConfig, measures: Mapping[str, np.ndarray], training: Training = MappingProxyType({})
) -> dict[str, np.ndarray]:
    """Of samples, from their measures."""
    patches = measures["patches"].astype(np.float64)
    return {
        "text": text_work(config.text, measures, training),
        "vision": _vision(config, training, patches, measures["patch_pairs"].astype(np.float64)),
    }


def _vision(config: LlavaConfig, training: Training, patches: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    vision, hidden = config.vision, config.text.hidden_size
    width = vision.hidden_size
    blocks = config.blocks_read * (4 * width + 2 * vision.intermediate_size) * width
    features = patches / vision.patches * config.features
    tower, projector_passes = training.get("vision", FULL), training.get("projector", FULL)
    total: np.ndarray = (
        tower.weights * 2 * patches * blocks
        + projector_passes.weights * 2 * features * hidden * (width + hidden)
        + tower.attention * 4 * config.blocks_read * width * pairs
    )
    embed = 2 * patches * vision.patch_values * width
    return total + tower.first * embed
