"""The processor of Qwen2-Audio: conversations with recordings to batches, and tokens back to text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tessera.errors import TesseraError
from tessera.models.audio.features import LogMel
from tessera.models.audio.processor import AudioProcessor, AudioSplitter
from tessera.models.processing.chat import ChatTemplate, MediaWords
from tessera.models.qwen2_audio.config import Qwen2AudioConfig
from tessera.models.qwen2_audio.model import POOL

CHAT = ChatTemplate(
    special=("<|im_start|>", "<|im_end|>", "<|audio_bos|>", "<|audio_eos|>"),
    media={"audio": MediaWords("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>\n", label="Audio {number}: ")},
)


@dataclass(frozen=True, eq=False)
class Qwen2AudioProcessor(AudioProcessor):
    version: ClassVar[str] = "qwen2_audio 1"
    chat: ClassVar[ChatTemplate] = CHAT
    processor_class: ClassVar[str] = "Qwen2AudioProcessor"

    @classmethod
    def splitter(cls, config: Qwen2AudioConfig, data: Mapping[str, Any], where: str) -> AudioSplitter:
        frames = config.audio.frames
        seconds = frames * LogMel.hop // LogMel.rate
        mel = LogMel.read({"chunk_length": seconds, "feature_size": config.audio.num_mel_bins, **data}, where)
        if mel.longest // mel.hop != frames:
            raise TesseraError(
                f"the folder's features of {mel.seconds} s have {mel.longest // mel.hop} frames, and the model's "
                f"encoder has positions for {frames}",
                where=where,
                fix=f"set max_source_positions of the model to {mel.longest // mel.hop // 2}, or chunk_length",
                code="media.audio-features-differ",
            )
        return AudioSplitter(mel, stride=2, reach=2, pool=POOL, chunk=frames)

    def named_tokens(self) -> dict[str, str]:
        return {"audio_token": "<|AUDIO|>", "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"}
