"""The configuration of Qwen2.5-VL, and its form in the config.json of Hugging Face folders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from tessera.models.qwen2_vl.config import TEXT as QWEN2_VL_TEXT
from tessera.models.qwen2_vl.config import Qwen2VLTextConfig
from tessera.models.text.hf import HFTextFormat
from tessera.models.vision.config import GridVisionConfig, QwenVLConfig

TEXT = replace(QWEN2_VL_TEXT, model_type="qwen2_5_vl_text")


class WindowVisionConfig(GridVisionConfig):
    """Configure the vision encoder of Qwen2.5-VL, which other families also have."""

    depth: int = Field(32, gt=0, le=10**4)
    hidden_size: int = Field(1280, gt=0, le=10**8)
    intermediate_size: int = Field(3420, gt=0, le=10**8)
    num_heads: int = Field(16, gt=0, le=10**8)
    window_size: int = Field(112, gt=0, le=10**8, description="pixels along each side of a window")
    fullatt_block_indexes: tuple[int, ...] = Field((7, 15, 23, 31), description="blocks with full attention")
    hidden_act: Literal["silu", "gelu", "gelu_pytorch_tanh", "quick_gelu"] = "silu"

    @property
    def window(self) -> int:
        """Return the number of tokens (merged patches) along each side of a window."""
        return self.window_size // self.spatial_merge_size // self.patch_size

    @property
    def full(self) -> tuple[int, ...]:
        """Return the indices of the vision blocks with full attention, without indices beyond the last block."""
        return tuple(number for number in self.fullatt_block_indexes if number < self.depth)

    @model_validator(mode="after")
    def _has_windows(self) -> WindowVisionConfig:
        if self.window < 1:
            raise ValueError(
                f"a window of {self.window_size} pixels is smaller than one token, "
                f"{self.patch_size * self.spatial_merge_size} pixels along each side"
            )
        return self


class Qwen25VLVisionConfig(WindowVisionConfig):
    tokens_per_second: int = Field(2, gt=0, le=10**8, description="time positions per second of a video")


class Qwen25VLConfig(QwenVLConfig):
    formats: ClassVar[Mapping[str, tuple[HFTextFormat, str]]] = {
        "qwen2_5_vl": (TEXT, "Qwen2_5_VLForConditionalGeneration")
    }
    vision_defaults: ClassVar[Mapping[str, Any]] = {"hidden_size": 3584, "tokens_per_second": 4}

    text: Qwen2VLTextConfig
    vision: Qwen25VLVisionConfig = Field(default_factory=lambda: Qwen25VLVisionConfig.model_validate({}))
