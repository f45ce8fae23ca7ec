"""The configuration of Qwen2-VL, and its form in the config.json of Hugging Face folders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from tessera.config.reader import build
from tessera.models.text.decoder import TextConfig
from tessera.models.text.hf import (
    NO_SLIDING_WINDOW,
    PLAIN_TEXT,
    Check,
    HFTextFormat,
    check_supported,
    hf_defaults,
    override,
)
from tessera.models.vision.family import GridVisionConfig, QwenVLConfig, rope_type

DEFAULT_SECTIONS = (16, 24, 24)
WHERE = "config.json (qwen2_vl)"
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
    depth: int = Field(32, gt=0, le=10**4)
    embed_dim: int = Field(1280, gt=0, le=10**8)
    num_heads: int = Field(16, gt=0, le=10**8)
    mlp_ratio: int = Field(4, gt=0, le=10**8)
    hidden_act: Literal["quick_gelu", "gelu", "gelu_pytorch_tanh"] = "quick_gelu"

    @model_validator(mode="after")
    def _divides(self) -> Qwen2VLVisionConfig:
        self.check_heads("embed_dim", self.num_heads)
        return self


class Qwen2VLConfig(QwenVLConfig):
    text: Qwen2VLTextConfig
    vision: Qwen2VLVisionConfig = Field(default_factory=lambda: Qwen2VLVisionConfig.model_validate({}))

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> Qwen2VLConfig:
        """From config.json: either with the text's fields at the top, as on the hub, or with `text_config`."""
        text, vision = cls.text_of(data), data.get("vision_config") or {}
        width, head = TEXT.hidden_and_head(text)
        checks: list[Check] = [
            ("model_type", data.get("model_type", "qwen2_vl"), ("qwen2_vl",)),
            ("head_dim", text.get("head_dim") or head, (head,)),
            ("vision_config.hidden_size", vision.get("hidden_size", 3584), (width,)),
            ("vision_config rope type", rope_type(vision), ("axial",)),
        ]
        check_supported(checks, WHERE)
        fields = {"text": TEXT.read(text, WHERE), "vision": Qwen2VLVisionConfig.read(vision)}
        return build(cls, {**cls.read_root(data, text), **fields}, WHERE)

    def to_hf(self) -> dict[str, Any]:
        """Return the config.json that transformers 5 writes and reads."""
        beside = {"hidden_size": self.text.hidden_size, "initializer_range": self.text.initializer_range}
        return {
            **self.write_root("qwen2_vl", "Qwen2VLForConditionalGeneration"),
            "text_config": TEXT.write(self.text),
            "vision_config": self.vision.write("qwen2_vl_vision", **beside),
        }
