"""The processor of Qwen2-VL: conversations with images and videos to batches, and tokens back to text."""

from __future__ import annotations

from typing import ClassVar

from tessera.models.processing.grounding import Grounding
from tessera.models.vision.grid_processor import GridProcessor


class Qwen2VLProcessor(GridProcessor):
    version: ClassVar[str] = "qwen2_vl 2"
    grounding: ClassVar[Grounding | None] = Grounding(
        box="({},{}),({},{})",
        point="({},{})",
        around=("<|box_start|>", "<|box_end|>"),
        around_name=("<|object_ref_start|>", "<|object_ref_end|>"),
    )
