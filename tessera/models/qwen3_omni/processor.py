"""The processor of Qwen3-Omni: conversations with images, videos and sound to batches, and tokens back to text.

Tokens of a sound track alternate with those of the frames of its video by their times. Times of frames need
not be whole numbers, so positions may be fractions.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any, ClassVar

import numpy as np

from tessera.models.audio.features import LogMel
from tessera.models.audio.omni_processor import OmniProcessor
from tessera.models.audio.processor import AudioSplitter
from tessera.models.processing.chat import ChatTemplate, MediaWords
from tessera.models.processing.grounding import Grounding
from tessera.models.processing.streams import MediaLayout
from tessera.models.qwen2 import QWEN_TURNS
from tessera.models.qwen3_omni.config import Qwen3OmniConfig
from tessera.models.qwen3_vl.model import bilinear_positions
from tessera.models.vision.grid_processor import TableGridProcessor
from tessera.models.vision.preprocessor_files import GridFiles

QWEN3_OMNI = ChatTemplate(
    special=("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|audio_start|>", "<|audio_end|>"),
    turns=QWEN_TURNS,
    media={
        "image": MediaWords("<|image_pad|>", "<|vision_start|>", "<|vision_end|>"),
        "video": MediaWords("<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
        "audio": MediaWords("<|audio_pad|>", "<|audio_start|>", "<|audio_end|>"),
    },
    system=None,
)


@dataclass(frozen=True, eq=False)
class Qwen3OmniProcessor(OmniProcessor, TableGridProcessor):
    version: ClassVar[str] = "qwen3_omni 1"
    chat: ClassVar[ChatTemplate] = QWEN3_OMNI
    grounding: ClassVar[Grounding | None] = Grounding(json=True)
    position_table = staticmethod(bilinear_positions)
    files: ClassVar[GridFiles] = GridFiles(
        processor="Qwen3OmniMoeProcessor",
        image_bounds=(56 * 56, 16384 * 28 * 28),
        video_bounds=(128 * 32 * 32, 768 * 32 * 32),
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
    )
    position_type: ClassVar[type[np.generic]] = np.float32

    @classmethod
    def of_model(cls, config: Qwen3OmniConfig) -> dict[str, Any]:
        return {**super().of_model(config), "table_side": config.vision.table_side}

    @classmethod
    def splitter(cls, config: Qwen3OmniConfig, mel: LogMel) -> AudioSplitter:
        return AudioSplitter.of_chunks(mel, config.audio.chunk, config.audio.n_window_infer)

    def interleave(self, frames: MediaLayout, track: MediaLayout) -> tuple[list[int], list[int]]:
        """Interleave runs so that each sound token precedes the frames with a later time position."""
        each, count, placed = sum(frames.tokens) // len(frames.times), sum(track.tokens), 0
        video, sound = [0], []
        for time in frames.times:
            earlier = min(count, ceil(time))
            if earlier > placed:
                video.append(0)
                sound.append(earlier - placed)
                placed = earlier
            video[-1] += each
        return video, [*sound, count - placed] if placed < count else sound
