"""Conversations with pictures and clips -> what a Qwen2-VL model reads, and back to text.

Pixels are those of the reference's Pillow preprocessor bit for bit; frames of clips take the same road (the reference
resizes clips with torchvision, whose bicubic filter differs from Pillow's by rounding).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from tessera.core.config import build
from tessera.data.chat import ChatTemplate
from tessera.models._chat.grids import GridOptions, GridProcessor
from tessera.models.qwen2_vl.config import Qwen2VLConfig


class Qwen2VLProcessor(GridProcessor):
    meaning: ClassVar[str] = "qwen2_vl 2"

    @classmethod
    def load(cls, config: Qwen2VLConfig, folder: Path, **options: Any) -> Qwen2VLProcessor:
        return cls.from_folder(
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
