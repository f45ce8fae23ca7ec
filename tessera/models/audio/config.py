"""Configurations of audio encoders, and their form in the `audio_config` of config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from tessera.config.reader import Section
from tessera.models.text.hf import Check, check_supported
from tessera.nn.audio import AudioShape

CHUNK_STRIDE = 8  # mel frames that become one token in encoders with a `ChunkAudioConfig`
CHUNK_TOKENS = 13  # number of tokens that transformers assumes in each full chunk
_NO_DROPOUT = ("dropout", "attention_dropout", "activation_dropout", "encoder_layerdrop")


class AudioConfig(Section):
    """Configure the blocks of an audio encoder. Fields have the names that transformers uses."""

    num_mel_bins: int = Field(128, gt=0, le=1024)
    encoder_layers: int = Field(32, gt=0, le=10**4)
    encoder_attention_heads: int = Field(20, gt=0, le=10**8)
    encoder_ffn_dim: int = Field(5120, gt=0, le=10**8)
    d_model: int = Field(1280, ge=4, le=10**8)
    activation_function: Literal["gelu", "gelu_pytorch_tanh", "quick_gelu", "silu"] = "gelu"

    @model_validator(mode="after")
    def _fits_heads(self) -> Self:
        if self.d_model % self.encoder_attention_heads or self.d_model % 2:
            raise ValueError(
                f"d_model {self.d_model} must be even and divisible by {self.encoder_attention_heads} (heads)"
            )
        return self

    def shape(self, attention: str, **options: Any) -> AudioShape:
        """Return the shape of the encoder. `options`: fields of `AudioShape` that the family sets."""
        return AudioShape(
            bins=self.num_mel_bins,
            hidden=self.d_model,
            intermediate=self.encoder_ffn_dim,
            layers=self.encoder_layers,
            heads=self.encoder_attention_heads,
            activation=self.activation_function,
            attention=attention,
            **options,
        )

    @classmethod
    def read(cls, audio: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return the fields of this class from the `audio_config` of a config.json."""
        checks: list[Check] = [(f"audio_config.{name}", audio.get(name) or 0.0, (0.0,)) for name in _NO_DROPOUT]
        check_supported(checks, where)
        return {name: audio[name] for name in cls.model_fields if audio.get(name) is not None}

    def write(self, model_type: str, initializer_range: float) -> dict[str, Any]:
        """Return the `audio_config` of a config.json."""
        dropouts = dict.fromkeys(_NO_DROPOUT, 0.0)
        return {
            "model_type": model_type,
            **self.model_dump(mode="json"),
            **dropouts,
            "scale_embedding": False,
            "initializer_range": initializer_range,
        }


class WhisperAudioConfig(AudioConfig):
    """Configure an encoder with a stored position embedding for each audio frame of the longest recording."""

    max_source_positions: int = Field(1500, gt=0, le=10**6)

    @property
    def frames(self) -> int:
        """Return the number of mel frames of the longest recording."""
        return 2 * self.max_source_positions


class ChunkAudioConfig(AudioConfig):
    """Configure an encoder with 2D convolutions over chunks of a recording.

    Attention windows consist of several chunks.
    """

    n_window: int = Field(50, gt=0, le=10**6, description="half of the mel frames of a chunk")
    n_window_infer: int = Field(800, gt=0, le=10**8, description="mel frames of an attention window")
    downsample_hidden_size: int = Field(480, gt=0, le=10**6, description="channels of the convolutions")

    @property
    def chunk(self) -> int:
        """Return the number of mel frames of a chunk."""
        return 2 * self.n_window

    @model_validator(mode="after")
    def _fits_chunks(self) -> Self:
        tokens = -(-self.chunk // CHUNK_STRIDE)
        if tokens != CHUNK_TOKENS:
            raise ValueError(
                f"a chunk of {self.chunk} mel frames has {tokens} tokens; transformers' class supports {CHUNK_TOKENS} "
                "tokens only"
            )
        if self.n_window_infer % self.chunk:
            raise ValueError(f"n_window_infer {self.n_window_infer} is not a multiple of the chunk length {self.chunk}")
        return self
