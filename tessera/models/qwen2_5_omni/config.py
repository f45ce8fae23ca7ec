"""The configuration of the thinker of Qwen2.5-Omni, and its form in the config.json of Hugging Face folders.

A published folder contains a thinker, a talker and a vocoder. The thinker is read from it; it is written as a folder of
its own, which transformers loads as `Qwen2_5OmniThinkerForConditionalGeneration`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from tessera.config.reader import build
from tessera.models.audio.config import AudioConfig
from tessera.models.qwen2_5_vl.config import WindowVisionConfig
from tessera.models.qwen2_vl.config import DEFAULT_SECTIONS, Qwen2VLTextConfig
from tessera.models.qwen2_vl.config import TEXT as QWEN2_VL_TEXT
from tessera.models.text.hf import Check, HFTextFormat, check_supported, hf_defaults
from tessera.models.vision.config import VisionLanguageConfig

FULL_MODEL = "qwen2_5_omni"  # `model_type` of folders with a thinker, a talker and a vocoder
THINKER = "qwen2_5_omni_thinker"  # of folders with a thinker alone
_TIMES = ("position_id_per_seconds", "seconds_per_chunk")
TEXT = replace(
    QWEN2_VL_TEXT,
    model_type="qwen2_5_omni_text",
    defaults={
        **hf_defaults(152064, 3584, 18944, 28, 28, 4, 32768),
        "rope_theta": 1e6,
        "mrope_section": DEFAULT_SECTIONS,
    },
)


class OmniAudioConfig(AudioConfig):
    n_window: int = Field(100, gt=0, le=10**6, description="half the number of mel frames of an attention window")

    @model_validator(mode="after")
    def _pairs_fit(self) -> Self:
        if self.n_window % 2:
            raise ValueError(f"n_window {self.n_window} must be even: two neighbouring elements become one token")
        return self


class Qwen25OmniConfig(VisionLanguageConfig):
    formats: ClassVar[Mapping[str, tuple[HFTextFormat, str]]] = {
        THINKER: (TEXT, "Qwen2_5OmniThinkerForConditionalGeneration")
    }
    vision_defaults: ClassVar[Mapping[str, Any]] = {"hidden_size": 3584}
    tie_in_text: ClassVar[bool] = False
    token_fields: ClassVar[Mapping[str, str]] = {
        "image_token_index": "<|IMAGE|>",
        "video_token_index": "<|VIDEO|>",
        "audio_token_index": "<|AUDIO|>",
        "vision_start_token_id": "<|vision_bos|>",
        "vision_end_token_id": "<|vision_eos|>",
        "audio_start_token_id": "<|audio_bos|>",
        "audio_end_token_id": "<|audio_eos|>",
    }

    text: Qwen2VLTextConfig
    vision: WindowVisionConfig = Field(default_factory=lambda: WindowVisionConfig.model_validate({}))
    audio: OmniAudioConfig = Field(default_factory=lambda: OmniAudioConfig.model_validate({}))
    image_token_index: int = Field(151655, ge=0)
    video_token_index: int = Field(151656, ge=0)
    audio_token_index: int = Field(151646, ge=0)
    vision_start_token_id: int = Field(151652, ge=0)
    vision_end_token_id: int = Field(151653, ge=0)
    audio_start_token_id: int = Field(151647, ge=0)
    audio_end_token_id: int = Field(151648, ge=0)
    position_id_per_seconds: int = Field(25, gt=0, le=10**6, description="time positions per second of a video")
    seconds_per_chunk: int = Field(
        2, gt=0, le=10**6, description="seconds of a video that its sound follows, before the next frames"
    )

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> Self:
        if data.get("model_type") == FULL_MODEL:
            data = {**(data.get("thinker_config") or {}), "model_type": THINKER}
        where = f"config.json ({THINKER})"
        base = super().from_hf(data)
        audio, width = data.get("audio_config") or {}, base.text.hidden_size
        checks: list[Check] = [
            ("audio_config.output_dim", audio.get("output_dim", 3584), (width,)),
            ("audio_config.scale_embedding", bool(audio.get("scale_embedding")), (False,)),
        ]
        check_supported(checks, where)
        times = {name: data[name] for name in _TIMES if data.get(name) is not None}
        return build(cls, {**base.model_dump(), "audio": OmniAudioConfig.read(audio, where), **times}, where)

    def to_hf(self) -> dict[str, Any]:
        fields = super().to_hf()
        fields["vision_config"]["model_type"] = "qwen2_5_omni_vision_encoder"
        audio = self.audio.write("qwen2_5_omni_audio_encoder", self.text.initializer_range)
        fields["audio_config"] = {**audio, "output_dim": self.text.hidden_size}
        return {**fields, **{name: getattr(self, name) for name in _TIMES}}
