"""The configuration of Whisper, read from and written to config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from tessera.config.reader import Section, build
from tessera.models.text.hf import check_model_type, check_supported
from tessera.nn.audio import AudioShape
from tessera.nn.cross_decoder import CrossDecoderShape
from tessera.ops.attention import AttentionBackend

MODEL_TYPE = "whisper"
STRIDE = 2  # number of mel frames between neighbouring positions of the encoder
REACH = 2  # number of mel frames that a position reads before and after its middle frame
# Each recording takes at least this many tokens of a row, including padding. So `data.length` limits how many
# recordings a row has, and pipeline stages know how many positions of the encoder a row can have.
LEAST_TOKENS = 32


class WhisperEncoderConfig(Section):
    num_mel_bins: int = Field(80, gt=0, le=1024, description="mel bins of a frame; large-v3 has 128")
    num_hidden_layers: int = Field(4, gt=0, le=10**4)
    num_attention_heads: int = Field(6, gt=0, le=10**6)
    intermediate_size: int = Field(1536, gt=0, le=10**8)
    max_source_positions: int = Field(
        1500, gt=0, le=10**6, description="positions of a recording, 20 ms each; shorter ones are padded with silence"
    )


class WhisperTextConfig(Section):
    vocab_size: int = Field(51865, gt=0, le=10**8)
    hidden_size: int = Field(384, gt=0, le=10**8, description="width of decoder and encoder")
    num_hidden_layers: int = Field(4, gt=0, le=10**4)
    num_attention_heads: int = Field(6, gt=0, le=10**6)
    intermediate_size: int = Field(1536, gt=0, le=10**8)
    max_target_positions: int = Field(
        448, gt=0, le=10**6, description="largest number of tokens of a transcript, with those before it"
    )
    initializer_range: float = Field(0.02, ge=0)
    decoder_start_token_id: int = Field(50258, ge=0)
    bos_token_id: int | None = 50257
    eos_token_id: int = Field(50257, ge=0)
    pad_token_id: int | None = 50257

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads


# Field of config.json -> (section, field) of `WhisperConfig`.
_FIELDS: Mapping[str, tuple[str, str]] = {
    "num_mel_bins": ("audio", "num_mel_bins"),
    "encoder_layers": ("audio", "num_hidden_layers"),
    "encoder_attention_heads": ("audio", "num_attention_heads"),
    "encoder_ffn_dim": ("audio", "intermediate_size"),
    "max_source_positions": ("audio", "max_source_positions"),
    "vocab_size": ("text", "vocab_size"),
    "d_model": ("text", "hidden_size"),
    "decoder_layers": ("text", "num_hidden_layers"),
    "decoder_attention_heads": ("text", "num_attention_heads"),
    "decoder_ffn_dim": ("text", "intermediate_size"),
    "max_target_positions": ("text", "max_target_positions"),
    "init_std": ("text", "initializer_range"),
    "decoder_start_token_id": ("text", "decoder_start_token_id"),
    "bos_token_id": ("text", "bos_token_id"),
    "eos_token_id": ("text", "eos_token_id"),
    "pad_token_id": ("text", "pad_token_id"),
}
# Values of fields that are missing in config.json: those of transformers' class.
_MISSING: Mapping[str, int] = {
    "decoder_start_token_id": 50257,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
    "pad_token_id": 50256,
}
_DROPOUTS = ("dropout", "attention_dropout", "activation_dropout", "encoder_layerdrop", "decoder_layerdrop")


class WhisperConfig(Section):
    text: WhisperTextConfig = Field(default_factory=WhisperTextConfig)
    audio: WhisperEncoderConfig = Field(default_factory=WhisperEncoderConfig)
    activation_function: Literal["gelu"] = "gelu"
    tie_word_embeddings: bool = True
    attention: AttentionBackend = Field("auto", description="implementation of attention")

    @model_validator(mode="after")
    def _divides(self) -> WhisperConfig:
        hidden = self.text.hidden_size
        for name, heads in (("text", self.text.num_attention_heads), ("audio", self.audio.num_attention_heads)):
            if hidden % heads:
                raise ValueError(f"text.hidden_size {hidden} does not split into the {heads} heads of {name}")
        return self

    @property
    def encoder(self) -> AudioShape:
        return AudioShape(
            bins=self.audio.num_mel_bins,
            hidden=self.text.hidden_size,
            intermediate=self.audio.intermediate_size,
            layers=self.audio.num_hidden_layers,
            heads=self.audio.num_attention_heads,
            activation=self.activation_function,
            positions=self.audio.max_source_positions,
            attention=self.attention,
        )

    @property
    def decoder(self) -> CrossDecoderShape:
        text = self.text
        return CrossDecoderShape(
            vocab=text.vocab_size,
            hidden=text.hidden_size,
            intermediate=text.intermediate_size,
            layers=text.num_hidden_layers,
            heads=text.num_attention_heads,
            positions=text.max_target_positions,
            activation=self.activation_function,
            attention=self.attention,
        )

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> WhisperConfig:
        check_model_type(str(data.get("model_type")), [MODEL_TYPE])
        where = f"config.json ({MODEL_TYPE})"
        check_supported(
            [
                *((name, float(data.get(name) or 0.0), (0.0,)) for name in _DROPOUTS),
                ("activation_function", data.get("activation_function", "gelu"), ("gelu",)),
                ("apply_spec_augment", bool(data.get("apply_spec_augment")), (False,)),
            ],
            where,
        )
        sections: dict[str, dict[str, Any]] = {"text": {}, "audio": {}}
        for theirs, (section, ours) in _FIELDS.items():
            value = data.get(theirs, _MISSING.get(theirs))
            if value is not None or theirs.endswith("_token_id"):
                sections[section][ours] = value
        return build(cls, {**sections, "tie_word_embeddings": bool(data.get("tie_word_embeddings", True))}, where)

    def to_hf(self) -> dict[str, Any]:
        """Return the fields of config.json. Rules for generation are only in generation_config.json."""
        plain = self.model_dump(mode="json")
        return {
            "architectures": ["WhisperForConditionalGeneration"],
            "model_type": MODEL_TYPE,
            **{theirs: plain[section][ours] for theirs, (section, ours) in _FIELDS.items()},
            **dict.fromkeys(_DROPOUTS, 0.0),
            "activation_function": self.activation_function,
            "begin_suppress_tokens": None,
            "suppress_tokens": None,
            "is_encoder_decoder": True,
            "tie_word_embeddings": self.tie_word_embeddings,
        }
