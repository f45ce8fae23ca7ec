"""The processor of Qwen2.5-Omni: conversations with images, videos and sound to batches, and tokens back to text.

Tokens of a sound track alternate with those of the frames of its video, a chunk of seconds at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

from tessera.models.audio.features import LogMel
from tessera.models.audio.omni_processor import OmniProcessor
from tessera.models.audio.processor import AudioSplitter
from tessera.models.processing.chat import ChatTemplate, MediaWords
from tessera.models.processing.streams import MediaLayout
from tessera.models.qwen2_5_omni.config import Qwen25OmniConfig
from tessera.models.qwen2_5_omni.model import POOL
from tessera.models.qwen2_5_vl.processor import Qwen25VLProcessor
from tessera.models.vision.preprocessor_files import GridFiles

OMNI = ChatTemplate(
    special=("<|im_start|>", "<|im_end|>", "<|vision_bos|>", "<|vision_eos|>", "<|audio_bos|>", "<|audio_eos|>"),
    media={
        "image": MediaWords("<|IMAGE|>", "<|vision_bos|>", "<|vision_eos|>"),
        "video": MediaWords("<|VIDEO|>", "<|vision_bos|>", "<|vision_eos|>"),
        "audio": MediaWords("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),
    },
)


@dataclass(frozen=True, eq=False)
class Qwen25OmniProcessor(OmniProcessor, Qwen25VLProcessor):
    version: ClassVar[str] = "qwen2_5_omni 1"
    chat: ClassVar[ChatTemplate] = OMNI
    files: ClassVar[GridFiles] = GridFiles(processor="Qwen2_5OmniProcessor")
    ends_share: ClassVar[bool] = True

    seconds_per_chunk: int = 2  # length of a chunk in seconds: frames, then their sound

    @classmethod
    def of_model(cls, config: Any) -> dict[str, Any]:
        return {
            **super().of_model(config),
            "window": config.vision.window,
            "seconds_per_chunk": config.seconds_per_chunk,
        }

    @classmethod
    def splitter(cls, config: Qwen25OmniConfig, mel: LogMel) -> AudioSplitter:
        # Convolutions and attention are computed in windows of the sound. Two audio frames become one token.
        return AudioSplitter(mel, stride=2, reach=2, pool=POOL, chunk=2 * config.audio.n_window, fills=False)

    def fingerprint_fields(self) -> list[Any]:
        return [*super().fingerprint_fields(), self.seconds_per_chunk]

    def interleave(self, frames: MediaLayout, track: MediaLayout) -> tuple[list[int], list[int]]:
        chunk = self.tokens_per_second * self.seconds_per_chunk
        each = sum(frames.tokens) // len(frames.times)  # number of tokens of a temporal patch
        sound = ((index, 1) for index in range(sum(track.tokens)))
        return _chunks([(time, each) for time in frames.times], chunk), _chunks(sound, chunk)


def _chunks(tokens: Iterable[tuple[float, int]], chunk: int) -> list[int]:
    """Return the number of tokens in each chunk of a video or of its sound track.

    `tokens`: pairs of a time position and the number of tokens there. `chunk`: time positions in a chunk. As in
    transformers, a chunk without tokens in its time (because of a long pause) gets the next token.
    """
    starts, at = [0], 0
    for time, count in tokens:
        reached = int(time // chunk) + 1 - len(starts)
        starts += range(at, at + min(max(reached, 0), count))
        at += count
    return [end - start for start, end in pairwise([*starts, at])]
