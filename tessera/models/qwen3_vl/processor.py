"""Conversations with pictures and clips -> what a Qwen3-VL model reads, and back to text.

Pixels are those of the reference's Pillow preprocessor bit for bit; frames of clips take the same road (the reference
resizes clips with torchvision, whose bicubic filter differs from Pillow's by rounding). Each pair of frames is a run of
visual tokens of its own, and before it stands the second at which it was shown.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from tessera.core.config import build
from tessera.core.types import Part
from tessera.data.chat import ChatTemplate, Piece
from tessera.data.media.clips import Rule
from tessera.models._chat.grids import GridOptions
from tessera.models._chat.preprocessor_files import GridFiles
from tessera.models._chat.processor import View
from tessera.models._chat.templates import QWEN_TURNS
from tessera.models._chat.timed_clips import TimedClipsProcessor
from tessera.models.qwen3_vl.config import Qwen3VLConfig
from tessera.models.qwen3_vl.positions import between_entries

TEMPLATE = ChatTemplate(turns=QWEN_TURNS, system=None)


class Qwen3VLOptions(GridOptions):
    """The `data.processor` section of a recipe. What is left out comes from the model's folder, if it says."""

    video_min_pixels: int | None = Field(
        None, gt=0, le=10**12, description="the same bounds for all frames of a clip together"
    )


@dataclass(frozen=True, eq=False)
class Qwen3VLProcessor(TimedClipsProcessor):
    meaning: ClassVar[str] = "qwen3_vl 2"
    frames_rule: ClassVar[Rule] = "ends"
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
    def load(cls, config: Qwen3VLConfig, folder: Path, **options: Any) -> Qwen3VLProcessor:
        made = cls.from_folder(
            Path(folder),
            build(Qwen3VLOptions, options, "data.processor"),
            TEMPLATE,
            geometry=config.vision,
            ids={
                "<|image_pad|>": config.image_token_id,
                "<|video_pad|>": config.video_token_id,
                "<|vision_start|>": config.vision_start_token_id,
                "<|vision_end|>": config.vision_end_token_id,
            },
            vocabulary=config.text.vocab_size,
        )
        return replace(made, table_side=config.vision.table_side)

    def caption(self, first: float, last: float) -> str:
        return f"<{(first + last) / 2:.1f} seconds>"

    def between(self, places: np.ndarray, height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
        return between_entries(places, height, width, self.table_side)

    def show(self, part: Part, role: str, view: View) -> list[Piece]:
        if part.kind != "video":
            return self.template.show(part, role)
        return [piece for told in view.captions for piece in (Piece(told, role), *self.template.show(part, role))]
