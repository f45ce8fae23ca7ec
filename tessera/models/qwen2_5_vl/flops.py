"""Floating-point operations of one forward and backward pass, by tower: see `_text.work` for what is counted.

No blank picture of an idle tower is counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from tessera.core.types import FULL, Batch, Training
from tessera.models._text.work import measures_of, text_work
from tessera.models.qwen2_5_vl.config import Qwen25VLConfig
from tessera.models.qwen2_5_vl.plan import block_weights, projector_weights


def flops(config: Qwen25VLConfig, batch: Batch, training: Training = MappingProxyType({})) -> float:
    """Of a batch that has not yet gone to the device."""
    return float(sum(part.sum() for part in work(config, measures_of(batch), training).values()))


def work(
    config: Qwen25VLConfig, measures: Mapping[str, np.ndarray], training: Training = MappingProxyType({})
) -> dict[str, np.ndarray]:
    """Of samples, from their measures."""
    return {
        "text": text_work(config.text, measures, training),
        "vision": _vision(config, training, *(measures[name].astype(np.float64) for name in _MEASURES)),
    }


_MEASURES = ("patches", "patch_pairs", "window_pairs")


def _vision(
    config: Qwen25VLConfig, training: Training, patches: np.ndarray, pairs: np.ndarray, near: np.ndarray
) -> np.ndarray:
    """`pairs`: of patches that attend to each other in whole frames, `near`: in windows."""
    vision = config.vision
    whole = len(vision.full)
    tower, projector_passes = training.get("vision", FULL), training.get("projector", FULL)
    total: np.ndarray = (
        tower.weights * 2 * patches * vision.depth * block_weights(vision)
        + projector_passes.weights * 2 * (patches // vision.spatial_merge_size**2) * projector_weights(config)
        + tower.attention * 4 * vision.hidden_size * (whole * pairs + (vision.depth - whole) * near)
    )
    embed = 2 * patches * vision.patch_values * vision.hidden_size
    return total + tower.first * embed
