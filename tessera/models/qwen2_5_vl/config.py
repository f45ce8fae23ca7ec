"""The configuration of Qwen2.5-VL, and its form in the config.json of Hugging Face folders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from tessera.config.reader import build
from tessera.models.qwen2_vl.config import DEFAULTS, Qwen2VLTextConfig
from tessera.models.text.hf import NO_SLIDING_WINDOW, PLAIN_TEXT, Check, HFTextFormat, check_supported, override
from tessera.models.vision.family import GridVisionConfig, QwenVLConfig, rope_type

WHERE = "config.json (qwen2_5_vl)"
TEXT = HFTextFormat(
    "qwen2_5_vl_text",
    override(PLAIN_TEXT, "mrope_section", attention_bias=True),
    DEFAULTS,
    omitted_fields=("attention_bias", "head_dim"),
    extra_fields=NO_SLIDING_WINDOW,
)
_SILENT = {"hidden_size": 3584, "tokens_per_second": 4}  # what a folder means that does not say


class Qwen25VLVisionConfig(GridVisionConfig):
    depth: int = Field(32, gt=0, le=10**4)
    hidden_size: int = Field(1280, gt=0, le=10**8)
    intermediate_size: int = Field(3420, gt=0, le=10**8)
    num_heads: int = Field(16, gt=0, le=10**8)
    tokens_per_second: int = Field(2, gt=0, le=10**8, description="positions along time that a second of a video takes")
    window_size: int = Field(112, gt=0, le=10**8, description="pixels along each side of a window")
    fullatt_block_indexes: tuple[int, ...] = Field((7, 15, 23, 31), description="blocks with full attention")
    hidden_act: Literal["silu", "gelu", "gelu_pytorch_tanh", "quick_gelu"] = "silu"

    @property
    def window(self) -> int:
        """Return the number of tokens (merged patches) along each side of a window."""
        return self.window_size // self.spatial_merge_size // self.patch_size

    @property
    def full(self) -> tuple[int, ...]:
        """Return the blocks with full attention, of those that exist."""
        return tuple(number for number in self.fullatt_block_indexes if number < self.depth)

    @model_validator(mode="after")
    def _divides(self) -> Qwen25VLVisionConfig:
        self.check_heads("hidden_size", self.num_heads)
        if self.window < 1:
            raise ValueError(
                f"a window of {self.window_size} pixels is smaller than one token, "
                f"{self.patch_size * self.spatial_merge_size} pixels along each side"
            )
        return self


class Qwen25VLConfig(QwenVLConfig):
    text: Qwen2VLTextConfig
    vision: Qwen25VLVisionConfig = Field(default_factory=lambda: Qwen25VLVisionConfig.model_validate({}))

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> Qwen25VLConfig:
        """From config.json: either with the text's fields at the top, as on the hub, or with `text_config`."""
        text, vision = cls.text_of(data), data.get("vision_config") or {}
        width, head = TEXT.hidden_and_head(text)
        checks: list[Check] = [
            ("model_type", data.get("model_type", "qwen2_5_vl"), ("qwen2_5_vl",)),
            ("head_dim", text.get("head_dim") or head, (head,)),
            ("vision_config.out_hidden_size", vision.get("out_hidden_size", 3584), (width,)),
            ("vision_config rope type", rope_type(vision), ("axial",)),
        ]
        check_supported(checks, WHERE)
        fields = {"text": TEXT.read(text, WHERE), "vision": Qwen25VLVisionConfig.read({**_SILENT, **vision})}
        return build(cls, {**cls.read_root(data, text), **fields}, WHERE)

    def to_hf(self) -> dict[str, Any]:
        """Return the config.json that transformers 5 writes and reads."""
        beside = {"out_hidden_size": self.text.hidden_size, "initializer_range": self.text.initializer_range}
        return {
            **self.write_root("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration"),
            "text_config": TEXT.write(self.text),
            "vision_config": self.vision.write("qwen2_5_vl_vision", **beside),
        }
