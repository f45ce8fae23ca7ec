"""The configuration of the thinker of Qwen2.5-Omni, and its form in the config.json of Hugging Face folders.

A published folder contains a thinker, a talker and a vocoder. The thinker is read from it; it is written as a folder of
its own, which transformers loads as `Qwen2_5OmniThinkerForConditionalGeneration`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from tessera.models.audio.config import AudioConfig
from tessera.models.audio.omni_config import OmniConfig
from tessera.models.qwen2_5_vl.config import WindowVisionConfig
from tessera.models.qwen2_vl.config import DEFAULT_SECTIONS, Qwen2VLTextConfig
from tessera.models.qwen2_vl.config import TEXT as QWEN2_VL_TEXT
from tessera.models.text.hf import HFTextFormat, hf_defaults

FULL_MODEL = "qwen2_5_omni"  # `model_type` of folders with a thinker, a talker and a vocoder
THINKER = "qwen2_5_omni_thinker"  # `model_type` of folders with a thinker alone
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
            raise ValueError(f"n_window {self.n_window} must be even: two neighbouring audio frames become one token")
        return self


class Qwen25OmniConfig(OmniConfig):
    formats: ClassVar[Mapping[str, tuple[HFTextFormat, str]]] = {
        THINKER: (TEXT, "Qwen2_5OmniThinkerForConditionalGeneration")
    }
    full_model: ClassVar[str] = FULL_MODEL
    time_fields: ClassVar[tuple[str, ...]] = ("position_id_per_seconds", "seconds_per_chunk")
    vision_defaults: ClassVar[Mapping[str, Any]] = {"hidden_size": 3584}
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
        2, gt=0, le=10**6, description="frames and sound of a video alternate in chunks of this many seconds"
    )
