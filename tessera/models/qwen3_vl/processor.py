"""The processor of Qwen3-VL: conversations with images and videos to batches, and tokens back to text.

Each pair of video frames is a run of visual tokens with its time in seconds written before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import Field

from tessera.core.sample import Part
from tessera.data.media.video_frames import Rule
from tessera.models.processing.chat import ChatSpan, ChatTemplate
from tessera.models.processing.grounding import Grounding
from tessera.models.processing.streams import MediaLayout
from tessera.models.qwen2 import QWEN_TURNS
from tessera.models.qwen3_vl.config import Qwen3VLConfig
from tessera.models.qwen3_vl.model import bilinear_positions
from tessera.models.vision.grid_processor import GridOptions, TimestampedVideoProcessor
from tessera.models.vision.preprocessor_files import GridFiles

TEMPLATE = ChatTemplate(turns=QWEN_TURNS, system=None)


class Qwen3VLOptions(GridOptions):
    """Declare the keys of `data.processor`. Missing keys get the values of the model's folder."""

    video_min_pixels: int | None = Field(
        None, gt=0, le=10**12, description="the same bounds for all frames of a video together"
    )


@dataclass(frozen=True, eq=False)
class Qwen3VLProcessor(TimestampedVideoProcessor):
    version: ClassVar[str] = "qwen3_vl 2"
    frames_rule: ClassVar[Rule] = "ends"
    options: ClassVar[type[GridOptions]] = Qwen3VLOptions
    chat: ClassVar[ChatTemplate] = TEMPLATE
    grounding: ClassVar[Grounding | None] = Grounding(json=True)
    position_table = staticmethod(bilinear_positions)
    files: ClassVar[GridFiles] = GridFiles(
        processor="Qwen3VLProcessor",
        video="Qwen3VLVideoProcessor",
        image_bounds=(256 * 256, 4096 * 4096),
        video_bounds=(4096, 24 << 20),
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        whole_clips=True,
    )

    @classmethod
    def of_model(cls, config: Qwen3VLConfig) -> dict[str, Any]:
        return {"table_side": config.vision.table_side}

    def timestamp(self, first: float, last: float) -> str:
        return f"<{(first + last) / 2:.1f} seconds>"

    def show(self, part: Part, role: str, layout: MediaLayout) -> list[ChatSpan]:
        if part.kind != "video":
            return self.template.show(part, role)
        return [span for time in layout.timestamps for span in (ChatSpan(time, role), *self.template.show(part, role))]
