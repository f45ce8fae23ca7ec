"""FLOPs of vision encoders, and example batches with images for estimates and dry runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from tessera.core.batch import Batch, Segments
from tessera.core.spec import FULL, Training
from tessera.models.text.costs import Measures, example_batch
from tessera.models.vision.processor import PATCHES
from tessera.nn.vit import VisionShape

EXAMPLE_IMAGES = 16  # maximum number of images in an example batch: usual numbers of data-parallel ranks divide it


@dataclass(frozen=True)
class VisionCosts:
    """Hold the sizes that determine the FLOPs of a vision encoder and its projector."""

    shape: VisionShape
    projector_weights: int  # number of weights that a visual token is multiplied by in the projector
    patches: int  # number of patches in a unit (merged block, tile or image), class token included
    tokens: int = 1  # number of visual tokens of a unit

    def work(self, measures: Measures, training: Training) -> np.ndarray:
        """Return the FLOPs of encoder and projector for each sample."""
        patches = measures["patches"].astype(np.float64)
        shape, blocks = self.shape, self.shape.blocks_used
        full = len(shape.full_attn_blocks) if shape.windows else blocks
        pairs = full * measures["patch_pairs"].astype(np.float64)
        if shape.windows:
            pairs = pairs + (blocks - full) * measures["window_pairs"].astype(np.float64)
        encoder, projector = training.get("vision", FULL), training.get("projector", FULL)
        total: np.ndarray = (
            encoder.weights * 2 * patches * blocks * shape.block_weights
            + projector.weights * 2 * (patches / self.patches * self.tokens) * self.projector_weights
            + encoder.attention * 4 * shape.hidden * pairs
            + encoder.first * 2 * patches * shape.patch_values * shape.hidden
        )
        return total


def example_with_media(tokens: int, media: Mapping[str, Tensor], lengths: Sequence[int], axes: int = 1) -> Batch:
    """Return an example batch with images. `lengths`: number of patches of each image. `axes`: see `example_batch`."""
    text = example_batch(tokens, axes)
    segments = {**text.segments, PATCHES.segments: Segments.of(lengths)}
    return replace(text, tensors={**text.tensors, **media}, segments=segments)
