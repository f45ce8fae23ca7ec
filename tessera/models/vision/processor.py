"""The vision stream of a batch, and the base class of processors that make it.

Pixels of images, as bytes before they are scaled, are those of transformers' Pillow preprocessors. With
`data.jpeg_draft`, which is off by default, large JPEGs are decoded at reduced size, which changes them slightly. Video
frames are resized by Pillow, too; transformers uses torchvision, whose bicubic filter rounds differently.
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
# The patches of a batch. Their encoder is known to the plan alone: its width and its blank input are added there.
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
    """Turn conversations with images and videos into batches with patches. `elements` gives `pixels` as bytes."""

    streams: ClassVar[MediaStreams] = VISION_STREAMS

    @property
    @abstractmethod
    def pixel_norm(self) -> Patches:
        """Return the normalisation that the device applies to the bytes in `pixels`."""
        ...

    def constants(self, stream: str) -> Mapping[str, np.ndarray]:
        return {"pixel_scale": self.pixel_norm.affine}
