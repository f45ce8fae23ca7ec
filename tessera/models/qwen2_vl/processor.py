"""The processor of Qwen2-VL: conversations with images and videos to batches, and tokens back to text."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from tessera.config.reader import build
from tessera.data.chat import ChatTemplate
from tessera.models.qwen2_vl.config import Qwen2VLConfig
from tessera.models.vision.grid_processor import GridOptions, GridProcessor


class Qwen2VLProcessor(GridProcessor):
    version: ClassVar[str] = "qwen2_vl 2"

    @classmethod
    def load(cls, config: Qwen2VLConfig, folder: Path, **options: Any) -> Qwen2VLProcessor:
        return cls.from_folder(
            Path(folder),
            build(GridOptions, options, "data.processor"),
            ChatTemplate(),
            geometry=config.vision,
            ids=config.special_token_ids,
            vocabulary=config.text.vocab_size,
        )
