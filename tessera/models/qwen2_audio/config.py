"""The configuration of Qwen2-Audio, and its form in the config.json of Hugging Face folders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, model_validator

from tessera.config.reader import Section, build
from tessera.models.audio.config import WhisperAudioConfig
from tessera.models.text.decoder import TextConfig
from tessera.models.text.hf import check_model_type, check_supported, read_language, write_language
from tessera.ops.attention import AttentionBackend

MODEL_TYPE, TOWER_TYPE = "qwen2_audio", "qwen2_audio_encoder"


class Qwen2AudioConfig(Section):
    tie_word_embeddings: ClassVar[bool] = False  # the class of transformers has a separate head

    text: TextConfig
    audio: WhisperAudioConfig = Field(default_factory=lambda: WhisperAudioConfig.model_validate({}))
    audio_token_id: int = Field(151646, ge=0)
    attention: AttentionBackend = Field("auto", description="implementation of attention")

    @model_validator(mode="after")
    def _fits(self) -> Qwen2AudioConfig:
        self.text.check_tokens({"audio_token_id": self.audio_token_id})
        return self

    @property
    def special_token_ids(self) -> dict[str, int]:
        return {"<|AUDIO|>": self.audio_token_id}

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> Qwen2AudioConfig:
        kind = str(data.get("model_type"))
        check_model_type(kind, (MODEL_TYPE,))
        where = f"config.json ({kind})"
        text, audio = dict(data.get("text_config") or {}), dict(data.get("audio_config") or {})
        check_supported([("audio_config.model_type", audio.get("model_type", TOWER_TYPE), (TOWER_TYPE,))], where)
        token = data.get("audio_token_index", data.get("audio_token_id"))
        fields = {
            "text": read_language(text, "qwen2", where),
            "audio": WhisperAudioConfig.read(audio, where),
            **({} if token is None else {"audio_token_id": token}),
        }
        return build(cls, fields, where)

    def to_hf(self) -> dict[str, Any]:
        """Return the config.json that transformers 5 writes and reads."""
        return {
            "architectures": ["Qwen2AudioForConditionalGeneration"],
            "model_type": MODEL_TYPE,
            "audio_token_index": self.audio_token_id,
            "text_config": write_language(self.text, "qwen2", False),
            "audio_config": self.audio.write(TOWER_TYPE, self.text.initializer_range),
        }
