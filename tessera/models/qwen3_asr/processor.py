"""The processor of Qwen3-ASR: conversations with recordings to batches, and tokens back to text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tessera.errors import TesseraError
from tessera.models.audio.features import LogMel, whole_number
from tessera.models.audio.processor import AudioProcessor, AudioSplitter
from tessera.models.processing.chat import ChatTemplate, MediaWords
from tessera.models.processing.transcription import Transcript, no_time_stamps
from tessera.models.qwen3_asr.config import Qwen3ASRConfig

CHAT = ChatTemplate(
    special=("<|im_start|>", "<|im_end|>", "<|audio_start|>", "<|audio_end|>"),
    media={"audio": MediaWords("<|audio_pad|>", "<|audio_start|>", "<|audio_end|>")},
    system="",  # without a system message, a conversation begins with an empty one
)
LEAST = 8000  # minimum number of samples of a recording, to which shorter ones are padded
TRANSCRIPT = "<asr_text>"  # separates the language and the text of an answer


@dataclass(frozen=True, eq=False)
class Qwen3ASRProcessor(AudioProcessor):
    version: ClassVar[str] = "qwen3_asr 1"
    chat: ClassVar[ChatTemplate] = CHAT
    processor_class: ClassVar[str] = "Qwen3ASRProcessor"
    extractor_class: ClassVar[str] = "Qwen3ASRFeatureExtractor"

    @classmethod
    def splitter(cls, config: Qwen3ASRConfig, data: Mapping[str, Any], where: str) -> AudioSplitter:
        audio = config.audio
        least = whole_number(data, "min_length", LEAST, 1 << 30, where, least=0)
        mel = LogMel.read({"feature_size": audio.num_mel_bins, **data}, where)
        return AudioSplitter.of_chunks(mel, audio.chunk, audio.n_window_infer, least)

    def extractor_fields(self) -> dict[str, Any]:
        return {"n_window": self.clips.chunk // 2, "min_length": self.clips.least}

    def transcription_instruction(self, language: str | None, prompt: str | None, timestamps: bool) -> str:
        if timestamps:
            raise no_time_stamps()
        for name, value in (("language", language), ("prompt", prompt)):
            if value:
                raise TesseraError(
                    f"this model detects the language and takes no text in addition to the recording, but {name} is "
                    "set",
                    fix=f"leave {name} out",
                    code="generation.option-without-effect",
                )
        return ""

    def transcript(self, answer: str) -> Transcript:
        """Return language and text of an answer such as `language English<asr_text>one two`."""
        before, mark, text = answer.partition(TRANSCRIPT)
        return Transcript(text, before.strip().removeprefix("language ")) if mark else Transcript(before)

    def named_tokens(self) -> dict[str, str]:
        return {
            "audio_token": "<|audio_pad|>",
            "audio_bos_token": "<|audio_start|>",
            "audio_eos_token": "<|audio_end|>",
        }
