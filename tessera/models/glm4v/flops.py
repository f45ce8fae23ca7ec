"""Floating-point operations of one forward and backward pass, by tower: see `_text.work` for what is counted.

No blank picture of an idle tower is counted.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tessera.core.types import Batch
from tessera.models._text.work import measures_of, text_work
from tessera.models.glm4v.config import Glm4vConfig
from tessera.models.glm4v.plan import block_weights, projector_weights


def flops(config: Glm4vConfig, batch: Batch) -> float:
    """Of a batch that has not yet gone to the device."""
    return float(sum(part.sum() for part in work(config, measures_of(batch)).values()))


def work(config: Glm4vConfig, measures: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Of samples, from their measures."""
    patches = measures["patches"].astype(np.float64)
    return {
        "text": text_work(config.text, measures),
        "vision": _vision(config, patches, measures["patch_pairs"].astype(np.float64)),
    }


def _vision(config: Glm4vConfig, patches: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    vision = config.vision
    forward: np.ndarray = (
        2 * patches * vision.depth * block_weights(config)
        + 2 * (patches // vision.spatial_merge_size**2) * projector_weights(config)
        + 4 * vision.depth * vision.hidden_size * pairs
    )
    # Nothing asks for the gradient of pixels, so the first product has one backward product instead of two.
    embed = 2 * patches * vision.patch_values * vision.hidden_size
    return 3.0 * forward + 2.0 * embed
