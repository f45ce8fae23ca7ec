"""The vision stream of a batch, and the base class of processors that make it.

The bytes of resized images equal those of transformers' Pillow preprocessors. With `data.jpeg_draft` (off by default)
large JPEGs are decoded at reduced size, which changes pixels slightly. Pillow also resizes video frames; transformers
uses torchvision for them, whose bicubic filter rounds differently.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tessera.core.model_plan import Stream
from tessera.core.sample import MediaSize, Message, Part, Region
from tessera.data.sources.regions import inside
from tessera.models.processing.chat import ChatSpan
from tessera.models.processing.conversation import ConversationProcessor
from tessera.models.processing.grounding import BoxScale, Grounding, read_numbers
from tessera.models.processing.streams import MediaStream, MediaStreams
from tessera.models.vision.patches import Patches

VISION = "vision"
# Batch tensors of patches and the modules that read them (see `Stream`), equal in all families. A family adds width and
# blank input of its encoder.
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
    """Turn conversations with images and videos into batches. `elements` returns uint8 patches, named `pixels`."""

    streams: ClassVar[MediaStreams] = VISION_STREAMS
    # how the family writes boxes and points; None: the family has no format for them
    grounding: ClassVar[Grounding | None] = None

    @property
    @abstractmethod
    def pixel_norm(self) -> Patches:
        """Return the patch settings with the mean and std that the device applies to the uint8 `pixels`."""
        ...

    def constants(self, stream: str) -> Mapping[str, np.ndarray]:
        return {"pixel_scale": self.pixel_norm.affine} if stream == VISION else {}

    # ------------------------------------------------------------------------------------------ boxes and points

    def box_scale(self, size: MediaSize) -> BoxScale:
        """Return the scale of boxes and points in an image of this size."""
        assert self.grounding is not None
        scale = self.grounding.scale
        resized = (scale, scale) if scale else self.target("image", size) or (size.width, size.height)
        return BoxScale(resized[0] / size.width, resized[1] / size.height)

    def write(self, part: Part, text: ChatSpan, images: Sequence[MediaSize]) -> list[ChatSpan]:
        if self.grounding is None:
            return super().write(part, text, images)

        def numbers(region: Region) -> Sequence[float]:
            size = images[region.image]
            return self.box_scale(size).numbers(inside(region, size))

        return self.grounding.write(part, text, numbers, lambda word: self.encoder.find(word) is not None)

    def answer_text(self, message: Message, images: Sequence[MediaSize]) -> str:
        """Return a message as `decode` would return it after tokenizing: with boxes in the family's format."""
        spans: list[ChatSpan] = []
        for part in message.parts:
            plain = ChatSpan(str(part.value), message.role)
            if part.kind == "text":
                spans += self.write(part, plain, images) if part.regions else [plain]
        return "".join(self.decode([self.encoder.id_of(s.text)]) if s.special else s.text for s in spans)

    def read_boxes(self, answer: str, size: MediaSize, points: bool = True) -> list[Region]:
        """Return the boxes and points that an answer names, in pixels of an image of this size.

        `points` False: boxes only, because two numbers in brackets may have another meaning.
        """
        if self.grounding is None:
            return []
        scale = self.box_scale(size)
        return [Region(scale.pixels(numbers), label) for numbers, label in read_numbers(answer, points)]
