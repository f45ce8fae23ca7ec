"""The configuration of Qwen3-ASR, and its form in the config.json of Hugging Face folders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, model_validator

from tessera.config.reader import Section, build
from tessera.models.audio.config import CHUNK_TOKENS, ChunkAudioConfig
from tessera.models.qwen3 import Qwen3TextConfig
from tessera.models.text.hf import QWEN3, check_model_type, check_supported, read_language, write_language
from tessera.ops.attention import AttentionBackend

MODEL_TYPE, TOWER_TYPE = "qwen3_asr", "qwen3_asr_encoder"
# Defaults of transformers for a folder whose `text_config` lacks these fields.
_TEXT_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 65536,
}


class Qwen3AudioConfig(ChunkAudioConfig):
    encoder_layers: int = Field(24, gt=0, le=10**4)
    encoder_attention_heads: int = Field(16, gt=0, le=10**8)
    encoder_ffn_dim: int = Field(4096, gt=0, le=10**8)
    d_model: int = Field(1024, ge=4, le=10**8)
    max_position_embeddings: int = Field(CHUNK_TOKENS, ge=CHUNK_TOKENS, le=10**6)


class Qwen3ASRConfig(Section):
    text: Qwen3TextConfig
    audio: Qwen3AudioConfig = Field(default_factory=lambda: Qwen3AudioConfig.model_validate({}))
    tie_word_embeddings: bool = True
    audio_token_id: int = Field(151676, ge=0)
    timestamp_token_id: int = Field(151705, ge=0, description="kept for exports: the model does not use it")
    attention: AttentionBackend = Field("auto", description="implementation of attention")

    @model_validator(mode="after")
    def _fits(self) -> Qwen3ASRConfig:
        self.text.check_tokens({"audio_token_id": self.audio_token_id})
        return self

    @property
    def special_token_ids(self) -> dict[str, int]:
        return {"<|audio_pad|>": self.audio_token_id}

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> Qwen3ASRConfig:
        kind = str(data.get("model_type"))
        check_model_type(kind, (MODEL_TYPE,))
        where = f"config.json ({kind})"
        text = {**_TEXT_DEFAULTS, **(data.get("text_config") or {})}
        audio = dict(data.get("audio_config") or {})
        width = audio.get("output_dim", 3584)
        check_supported(
            [
                ("audio_config.model_type", audio.get("model_type", TOWER_TYPE), (TOWER_TYPE,)),
                ("audio_config.output_dim", width, (text["hidden_size"],)),
            ],
            where,
        )
        tied = data.get("tie_word_embeddings")
        fields = {
            **{name: data[name] for name in ("audio_token_id", "timestamp_token_id") if data.get(name) is not None},
            "tie_word_embeddings": True if tied is None else tied,
            "text": read_language(text, QWEN3.model_type, where),
            "audio": Qwen3AudioConfig.read(audio, where),
        }
        return build(cls, fields, where)

    def to_hf(self) -> dict[str, Any]:
        """Return the config.json that transformers 5 writes and reads."""
        text = self.text
        ids = text.model_dump(mode="json", include={"pad_token_id", "eos_token_id"})
        return {
            "architectures": ["Qwen3ASRForConditionalGeneration"],
            "model_type": MODEL_TYPE,
            "audio_token_id": self.audio_token_id,
            "timestamp_token_id": self.timestamp_token_id,
            **{name: ids[name] for name in ("pad_token_id", "eos_token_id") if ids[name] is not None},
            "initializer_range": text.initializer_range,
            "tie_word_embeddings": self.tie_word_embeddings,
            "text_config": write_language(text, QWEN3.model_type, self.tie_word_embeddings),
            "audio_config": {
                **self.audio.write(TOWER_TYPE, text.initializer_range),
                "output_dim": text.hidden_size,
            },
        }
