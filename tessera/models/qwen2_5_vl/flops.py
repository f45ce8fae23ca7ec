"""Floating-point operations of one forward and backward pass, by tower: see `_text.work` for what is counted.

No blank picture of an idle tower is counted.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tessera.core.types import Batch
from tessera.models._text.work import measures_of, text_work
from tessera.models.qwen2_5_vl.config import Qwen25VLConfig
from tessera.models.qwen2_5_vl.plan import block_weights, projector_weights


def flops(config: Qwen25VLConfig, batch: Batch) -> float:
    """Of a batch that has not yet gone to the device."""
    return float(sum(part.sum() for part in work(config, measures_of(batch)).values()))


def work(config: Qwen25VLConfig, measures: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Of samples, from their measures."""
    return {
        "text": text_work(config.text, measures),
        "vision": _vision(config, *(measures[name].astype(np.float64) for name in _MEASURES)),
    }


_MEASURES = ("patches", "patch_pairs", "window_pairs")


def _vision(config: Qwen25VLConfig, patches: np.ndarray, pairs: np.ndarray, near: np.ndarray) -> np.ndarray:
    """`pairs`: of patches that attend to each other in whole frames, `near`: in windows."""
    vision = config.vision
    whole = len(vision.full)
    forward: np.ndarray = (
        2 * patches * vision.depth * block_weights(vision)
        + 2 * (patches // vision.spatial_merge_size**2) * projector_weights(config)
        + 4 * vision.hidden_size * (whole * pairs + (vision.depth - whole) * near)
    )
    # Nothing asks for the gradient of pixels, so the first product has one backward product instead of two.
    embed = 2 * patches * vision.patch_values * vision.hidden_size
    return 3.0 * forward + 2.0 * embed
