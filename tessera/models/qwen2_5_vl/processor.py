"""Conversations with pictures and clips -> what a Qwen2.5-VL model reads, and back to text.

Pixels are those of the reference's Pillow preprocessor bit for bit; frames of clips take the same road (the reference
resizes clips with torchvision, whose bicubic filter differs from Pillow's by rounding). Patches lie window by window,
as the tower wants them, and each token's place in the text says where its embedding goes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from tessera.core.config import build
from tessera.core.types import MediaSize, PartKind
from tessera.data.chat import ChatTemplate
from tessera.models._chat.grids import GridOptions, GridProcessor
from tessera.models._chat.preprocessor_files import GridFiles
from tessera.models._chat.processor import View
from tessera.models.qwen2_5_vl.config import Qwen25VLConfig
from tessera.models.qwen2_5_vl.windows import window_order, window_sizes


@dataclass(frozen=True, eq=False)
class Qwen25VLProcessor(GridProcessor):
    meaning: ClassVar[str] = "qwen2_5_vl 1"
    files: ClassVar[GridFiles] = GridFiles(processor="Qwen2_5_VLProcessor")

    window: int = 4  # tokens along each side of a window
    tokens_per_second: int = 2  # positions along time

    @classmethod
    def load(cls, config: Qwen25VLConfig, folder: Path, **options: Any) -> Qwen25VLProcessor:
        made = cls.from_folder(
            Path(folder),
            build(GridOptions, options, "data.processor"),
            ChatTemplate(),
            geometry=config.vision,
            ids={
                "<|image_pad|>": config.image_token_id,
                "<|video_pad|>": config.video_token_id,
                "<|vision_start|>": config.vision_start_token_id,
                "<|vision_end|>": config.vision_end_token_id,
            },
            vocabulary=config.text.vocab_size,
        )
        return replace(made, window=config.vision.window, tokens_per_second=config.vision.tokens_per_second)

    def facts(self) -> list[Any]:
        return [*super().facts(), self.window]

    def view(self, kind: PartKind, size: MediaSize) -> View:
        plain = super().view(kind, size)
        merge = self.image.merge
        t, rows, columns = plain.grid[0], plain.grid[1] // merge, plain.grid[2] // merge
        one = window_order(rows, columns, self.window)
        windows = [merge**2 * count for count in window_sizes(rows, columns, self.window)]
        return replace(
            plain,
            windows=tuple(windows) * t,
            order=(np.arange(t)[:, None] * (rows * columns) + one).reshape(-1),
            interval=self._interval(size) if kind == "video" else 1.0,
        )

    def _interval(self, size: MediaSize) -> float:
        """Positions from one temporal patch to the next. Frames of which nobody knows the rate are taken as sampled
        already, at the rate that clips are sampled at. Rounded to fp32 where the reference rounds."""
        seconds = np.float32(self.video.temporal / (size.fps or self.sampling.fps))
        return float(seconds * np.float32(self.tokens_per_second))
