"""Floating-point operations of one forward and backward pass, by tower: see `_text.work` for what is counted.

No blank picture of an idle tower is counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from tessera.core.types import FULL, Batch, Training
from tessera.models._text.work import measures_of, text_work
from tessera.models.qwen3_vl.config import Qwen3VLConfig


def flops(config: Qwen3VLConfig, batch: Batch, training: Training = MappingProxyType({})) -> float:
    """Of a batch that has not yet gone to the device."""
    return float(sum(part.sum() for part in work(config, measures_of(batch), training).values()))


def work(
    config: Qwen3VLConfig, measures: Mapping[str, np.ndarray], training: Training = MappingProxyType({})
) -> dict[str, np.ndarray]:
    """Of samples, from their measures."""
    patches = measures["patches"].astype(np.float64)
    return {
        "text": text_work(config.text, measures, training),
        "vision": _vision(config, training, patches, measures["patch_pairs"].astype(np.float64)),
    }


def _vision(config: Qwen3VLConfig, training: Training, patches: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    vision, hidden = config.vision, config.vision.hidden_size
    block = vision.spatial_merge_size**2
    joined = hidden * block
    blocks = vision.depth * (4 * hidden + 2 * vision.intermediate_size) * hidden
    mergers = (1 + len(vision.deepstack_visual_indexes)) * joined * (joined + config.text.hidden_size)
    tower, projector_passes = training.get("vision", FULL), training.get("projector", FULL)
    total: np.ndarray = (
        tower.weights * 2 * patches * blocks
        + projector_passes.weights * 2 * (patches // block) * mergers
        + tower.attention * 4 * vision.depth * hidden * pairs
    )
    embed = 2 * patches * vision.patch_values * hidden
    return total + tower.first * embed
