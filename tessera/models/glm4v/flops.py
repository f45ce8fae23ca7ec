"""Floating-point operations of one forward and backward pass, by tower: see `_text.work` for what is counted.

No blank picture of an idle tower is counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from tessera.core.types import FULL, Batch, Training
from tessera.models._text.work import measures_of, text_work
from tessera.models.glm4v.config import Glm4vConfig
from tessera.models.glm4v.plan import block_weights, projector_weights


def flops(config: Glm4vConfig, batch: Batch, training: Training = MappingProxyType({})) -> float:
    """Of a batch that has not yet gone to the device."""
    return float(sum(part.sum() for part in work(config, measures_of(batch), training).values()))


def work(
    config: Glm4vConfig, measures: Mapping[str, np.ndarray], training: Training = MappingProxyType({})
) -> dict[str, np.ndarray]:
    """Of samples, from their measures."""
    patches = measures["patches"].astype(np.float64)
    return {
        "text": text_work(config.text, measures, training),
        "vision": _vision(config, training, patches, measures["patch_pairs"].astype(np.float64)),
    }


def _vision(config: Glm4vConfig, training: Training, patches: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    vision = config.vision
    tower, projector_passes = training.get("vision", FULL), training.get("projector", FULL)
    total: np.ndarray = (
        tower.weights * 2 * patches * vision.depth * block_weights(config)
        + projector_passes.weights * 2 * (patches // vision.spatial_merge_size**2) * projector_weights(config)
        + tower.attention * 4 * vision.depth * vision.hidden_size * pairs
    )
    embed = 2 * patches * vision.patch_values * vision.hidden_size
    return total + tower.first * embed
