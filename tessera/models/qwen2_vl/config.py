"""The configuration of Qwen2-VL, and its form in the config.json of Hugging Face folders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from tessera.models.text.decoder import TextConfig
from tessera.models.text.hf import (
    NO_SLIDING_WINDOW,
    PLAIN_TEXT,
    HFTextFormat,
    hf_defaults,
    override,
)
from tessera.models.vision.config import GridVisionConfig, QwenVLConfig

DEFAULT_SECTIONS = (16, 24, 24)
DEFAULTS = {
    **hf_defaults(152064, 8192, 29568, 80, 64, 8, 32768, bos_token_id=151643, eos_token_id=151645),
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "mrope_section": DEFAULT_SECTIONS,
}
TEXT = HFTextFormat(
    "qwen2_vl_text",
    override(PLAIN_TEXT, "mrope_section", attention_bias=True),
    DEFAULTS,
    omitted_fields=("attention_bias", "head_dim"),
    extra_fields=NO_SLIDING_WINDOW,
)


class Qwen2VLTextConfig(TextConfig):
    attention_bias: bool = True
    rope_theta: float = Field(1e6, gt=0)
    mrope_section: tuple[int, int, int] | None = DEFAULT_SECTIONS
    bos_token_id: int | None = 151643
    eos_token_id: int | tuple[int, ...] | None = 151645


class Qwen2VLVisionConfig(GridVisionConfig):
    width_field: ClassVar[str] = "embed_dim"

    depth: int = Field(32, gt=0, le=10**4)
    embed_dim: int = Field(1280, gt=0, le=10**8)
    num_heads: int = Field(16, gt=0, le=10**8)
    mlp_ratio: int = Field(4, gt=0, le=10**8)
    hidden_act: Literal["quick_gelu", "gelu", "gelu_pytorch_tanh"] = "quick_gelu"


class Qwen2VLConfig(QwenVLConfig):
    formats: ClassVar[Mapping[str, tuple[HFTextFormat, str]]] = {"qwen2_vl": (TEXT, "Qwen2VLForConditionalGeneration")}
    output_field: ClassVar[tuple[str, int]] = ("hidden_size", 3584)

    text: Qwen2VLTextConfig
    vision: Qwen2VLVisionConfig = Field(default_factory=lambda: Qwen2VLVisionConfig.model_validate({}))
