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
from tessera.core.types import MediaSize, Part, PartKind
from tessera.data.chat import ChatTemplate, Piece, Turn
from tessera.data.media.clips import spread
from tessera.data.patches import block_positions
from tessera.models._chat.grids import GridOptions, GridProcessor
from tessera.models._chat.preprocessor_files import GridFiles
from tessera.models._chat.processor import View
from tessera.models.qwen3_vl.config import Qwen3VLConfig
from tessera.models.qwen3_vl.positions import between_entries

UNKNOWN_RATE = 24.0  # frames per second of a clip that does not say: what the reference takes it for
TEMPLATE = ChatTemplate(
    turns={
        # What functions answered comes as a user's turn, several answers in one.
        "tool": Turn(
            "<|im_start|>user\n<tool_response>\n",
            "\n</tool_response><|im_end|>\n",
            between="\n</tool_response>\n<tool_response>\n",
        ),
        "": Turn("<|im_start|>{role}\n", "<|im_end|>\n"),
    },
    system=None,
)


class Qwen3VLOptions(GridOptions):
    """The `data.processor` section of a recipe. What is left out comes from the model's folder, if it says."""

    video_min_pixels: int | None = Field(None, gt=0, description="the same bounds for all frames of a clip together")


@dataclass(frozen=True, eq=False)
class Qwen3VLProcessor(GridProcessor):
    meaning: ClassVar[str] = "qwen3_vl 1"
    files: ClassVar[GridFiles] = GridFiles(
        processor="Qwen3VLProcessor",
        video="Qwen3VLVideoProcessor",
        image_bounds=(256 * 256, 4096 * 4096),
        video_bounds=(4096, 24 << 20),
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        whole_clips=True,
    )

    table_side: int = 48

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

    def view(self, kind: PartKind, size: MediaSize) -> View:
        patches = self.patches(kind)
        t, h, w = patches.grid(size.height, size.width, size.frames)
        captions = tuple(f"<{second:.1f} seconds>" for second in _seconds(size, t, patches.temporal))
        return View(
            tokens=(h * w // patches.merge**2,) * t,
            pieces=(h * w,) * t,
            grid=(t, h, w),
            captions=captions if kind == "video" else (),
        )

    def show(self, part: Part, role: str, view: View) -> list[Piece]:
        if part.kind != "video":
            return self.template.show(part, role)
        return [piece for told in view.captions for piece in (Piece(told, role), *self.template.show(part, role))]

    def pixels(self, kind: PartKind, media: Any, view: View) -> dict[str, np.ndarray]:
        t, h, w = view.grid
        index, weights = between_entries(block_positions(h, w, self.image.merge), h, w, self.table_side)
        return {
            **super().pixels(kind, media, view),
            "patch_index": np.tile(index, (t, 1)),
            "patch_weights": np.tile(weights, (t, 1)),
        }


def _seconds(size: MediaSize, steps: int, temporal: int) -> list[float]:
    """When each step of a clip was shown: in the middle between its first frame and its last."""
    chosen = spread(size.frames, size.total or size.frames)
    rate, last = size.rate or UNKNOWN_RATE, size.frames - 1
    ends = [(chosen[min(n * temporal, last)], chosen[min((n + 1) * temporal - 1, last)]) for n in range(steps)]
    return [(first / rate + end / rate) / 2 for first, end in ends]
