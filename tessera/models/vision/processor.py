"""The vision stream of a batch, and the base class of processors that make it.

The bytes of resized images equal those of transformers' Pillow preprocessors. With `data.jpeg_draft` (off by default)
large JPEGs are decoded at reduced size, which changes pixels slightly. Pillow also resizes video frames; transformers
uses torchvision for them, whose bicubic filter rounds differently.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tessera.core.model_plan import Stream
from tessera.models.processing.conversation import ConversationProcessor
from tessera.models.processing.streams import MediaStream, MediaStreams
from tessera.models.vision.patches import Patches

VISION = "vision"
# Tensors of the patches in a batch. `vision_stream` adds the encoder's width and blank input.
PATCHES = Stream(
    tensors=("pixels", "patch_positions", "patch_index", "patch_weights"),
    segments=VISION,
    windows=f"{VISION}.windows",
    module=VISION,
    projector="projector",
    slots="media_slots",
)
VISION_STREAMS: MediaStreams = {
    VISION: MediaStream(PATCHES, ("image", "video"), "patches", "patch_pairs", "window_pairs")
}


@dataclass(frozen=True, eq=False)
class VisionProcessor(ConversationProcessor):
    """Turn conversations with images and videos into batches. `elements` returns the patches `pixels` as uint8."""

    streams: ClassVar[MediaStreams] = VISION_STREAMS

    @property
    @abstractmethod
    def pixel_norm(self) -> Patches:
        """Return the patch settings with the mean and std that the device applies to the uint8 `pixels`."""
        ...

    def constants(self, stream: str) -> Mapping[str, np.ndarray]:
        return {"pixel_scale": self.pixel_norm.affine}
