"""The configuration of the thinker of Qwen3-Omni, and its form in the config.json of Hugging Face folders.

A published folder contains a thinker, a talker and a vocoder. The thinker is read from it; it is written as a folder of
its own, which transformers loads as `Qwen3OmniMoeThinkerForConditionalGeneration`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, model_validator

from tessera.models.audio.config import ChunkAudioConfig
from tessera.models.audio.omni_config import OmniConfig
from tessera.models.qwen3_vl.config import SECTIONS, Qwen3VLTextConfig, Qwen3VLVisionConfig, check_taps
from tessera.models.text.decoder import ExpertsConfig
from tessera.models.text.hf import PLAIN_TEXT, HFTextFormat, hf_defaults, hf_expert_defaults, override
from tessera.models.vision.config import QwenVLConfig

FULL_MODEL = "qwen3_omni_moe"  # `model_type` of folders with a thinker, a talker and a vocoder
THINKER = "qwen3_omni_moe_thinker"  # `model_type` of folders with a thinker alone
TEXT = HFTextFormat(
    "qwen3_omni_moe_text",
    override(PLAIN_TEXT, "experts", "mrope_section", attention_bias=False, qk_norm=True, mrope_interleaved=True),
    {
        **hf_defaults(3584, 2048, 18944, 28, 28, 4, 32768, head_dim=None),
        "rope_theta": 1e6,
        "mrope_section": SECTIONS,
    },
    hf_expert_defaults(128, 8, 768, normalized=True),
)


class Qwen3OmniTextConfig(Qwen3VLTextConfig):
    rope_theta: float = Field(1e6, gt=0)
    max_position_embeddings: int = Field(65536, gt=0, le=10**8)
    experts: ExpertsConfig  # transformers has no such model without experts


class Qwen3OmniConfig(OmniConfig, QwenVLConfig):
    formats: ClassVar[Mapping[str, tuple[HFTextFormat, str]]] = {
        THINKER: (TEXT, "Qwen3OmniMoeThinkerForConditionalGeneration")
    }
    full_model: ClassVar[str] = FULL_MODEL
    time_fields: ClassVar[tuple[str, ...]] = ("position_id_per_seconds",)
    hf_fields: ClassVar[Mapping[str, Any]] = {
        "audio_token_id": 151646,
        "audio_start_token_id": 151647,
        "position_id_per_seconds": 25,
    }
    token_fields: ClassVar[Mapping[str, str]] = {
        **QwenVLConfig.token_fields,
        "audio_token_id": "<|audio_pad|>",
        "audio_start_token_id": "<|audio_start|>",
        "audio_end_token_id": "<|audio_end|>",
    }

    text: Qwen3OmniTextConfig
    vision: Qwen3VLVisionConfig = Field(default_factory=lambda: Qwen3VLVisionConfig.model_validate({}))
    audio: ChunkAudioConfig = Field(default_factory=lambda: ChunkAudioConfig.model_validate({}))
    audio_token_id: int = Field(151675, ge=0)
    audio_start_token_id: int = Field(151669, ge=0)
    audio_end_token_id: int = Field(151670, ge=0)
    position_id_per_seconds: int = Field(13, gt=0, le=10**6, description="time positions per second of a video")

    @model_validator(mode="after")
    def _fits(self) -> Qwen3OmniConfig:
        check_taps(self.vision, self.text)
        return self
