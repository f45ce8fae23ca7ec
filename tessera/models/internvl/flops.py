"""Floating-point operations of one forward and backward pass, by tower: see `_text.work` for what is counted.

No blank picture of an idle tower is counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from tessera.core.types import FULL, Batch, Training
from tessera.models._text.work import measures_of, text_work
from tessera.models.internvl.config import InternVLConfig


def flops(config: InternVLConfig, batch: Batch, training: Training = MappingProxyType({})) -> float:
    """Of a batch that has not yet gone to the device."""
    return float(sum(part.sum() for part in work(config, measures_of(batch), training).values()))


def work(
    config: InternVLConfig, measures: Mapping[str, np.ndarray], training: Training = MappingProxyType({})
) -> dict[str, np.ndarray]:
    """Of samples, from their measures."""
    rows = measures["patches"].astype(np.float64)
    return {
        "text": text_work(config.text, measures, training),
        "vision": _vision(config, training, rows, measures["patch_pairs"].astype(np.float64)),
    }


def _vision(config: InternVLConfig, training: Training, rows: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """`rows`: patches, and the class tokens of tiles."""
    vision, hidden = config.vision, config.text.hidden_size
    layers, width = vision.num_hidden_layers, vision.hidden_size
    blocks = layers * (4 * width + 2 * vision.intermediate_size) * width
    projector = (width * vision.spatial_merge_size**2 + hidden) * hidden
    tokens = rows / vision.tile_rows * vision.tile_tokens
    tower, projector_passes = training.get("vision", FULL), training.get("projector", FULL)
    total: np.ndarray = (
        tower.weights * 2 * rows * blocks
        + projector_passes.weights * 2 * tokens * projector
        + tower.attention * 4 * layers * width * pairs
    )
    embed = 2 * rows * vision.patch_values * width
    return total + tower.first * embed
