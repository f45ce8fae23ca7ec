"""The configuration of GLM-4.1V, and its form in the config.json of Hugging Face folders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from tessera.models.text.decoder import TextConfig
from tessera.models.text.hf import PLAIN_TEXT, Check, HFTextFormat, hf_defaults, override
from tessera.models.vision.config import GridVisionConfig, VisionLanguageConfig

DEFAULT_SECTIONS = (8, 12, 12)
TEXT = HFTextFormat(
    "glm4v_text",
    override(PLAIN_TEXT, "mrope_section", "partial_rotary_factor", sandwich_norm=True, attention_bias=True),
    # Without partial_rotary_factor in config.json all dimensions are rotated, as in transformers.
    hf_defaults(
        *(151552, 4096, 13696, 40, 32, 2, 32768),
        rms_norm_eps=1e-5,
        mrope_section=DEFAULT_SECTIONS,
        partial_rotary_factor=1.0,
    ),
    omitted_fields=("attention_bias", "head_dim"),
)


class Glm4vTextConfig(TextConfig):
    attention_bias: bool = True
    sandwich_norm: bool = True
    rms_norm_eps: float = Field(1e-5, gt=0)
    partial_rotary_factor: float = Field(0.5, gt=0, le=1)
    mrope_section: tuple[int, int, int] | None = DEFAULT_SECTIONS
    eos_token_id: int | tuple[int, ...] | None = (151329, 151336, 151338, 151348)
    pad_token_id: int | None = 151329


class Glm4vVisionConfig(GridVisionConfig):
    depth: int = Field(24, gt=0, le=10**4)
    hidden_size: int = Field(1536, gt=0, le=10**8)
    intermediate_size: int = Field(
        13696, gt=0, description="of the projector; the blocks of the encoder use the text decoder's width"
    )
    num_heads: int = Field(12, gt=0, le=10**8)
    image_size: int = Field(
        336, gt=0, le=10**8, description="side of an image with one patch per entry of the position embedding"
    )
    attention_bias: bool = Field(False, description="bias of the projection to queries, keys and values")
    hidden_act: Literal["silu"] = "silu"
    rms_norm_eps: float = Field(1e-5, gt=0)

    @property
    def table_side(self) -> int:
        """Return the number of rows and columns of the learned position embedding."""
        return self.image_size // self.patch_size

    @model_validator(mode="after")
    def _has_patches(self) -> Glm4vVisionConfig:
        if self.image_size < self.patch_size:
            raise ValueError(f"image_size {self.image_size} is smaller than a patch ({self.patch_size})")
        return self


class Glm4vConfig(VisionLanguageConfig):
    formats: ClassVar[Mapping[str, tuple[HFTextFormat, str]]] = {"glm4v": (TEXT, "Glm4vForConditionalGeneration")}
    output_field: ClassVar[tuple[str, int]] = ("out_hidden_size", 4096)
    token_fields: ClassVar[Mapping[str, str]] = {
        "image_token_id": "<|image|>",
        "video_token_id": "<|video|>",
        "image_start_token_id": "<|begin_of_image|>",
        "image_end_token_id": "<|end_of_image|>",
        "video_start_token_id": "<|begin_of_video|>",
        "video_end_token_id": "<|end_of_video|>",
    }

    text: Glm4vTextConfig
    vision: Glm4vVisionConfig = Field(default_factory=lambda: Glm4vVisionConfig.model_validate({}))
    image_token_id: int = Field(151343, ge=0)
    video_token_id: int = Field(151344, ge=0)
    image_start_token_id: int = Field(151339, ge=0)
    image_end_token_id: int = Field(151340, ge=0)
    video_start_token_id: int = Field(151341, ge=0)
    video_end_token_id: int = Field(151342, ge=0)

    @property
    def end_tokens(self) -> tuple[int, ...]:
        ends = self.text.eos_token_id
        return () if ends is None else (ends,) if isinstance(ends, int) else ends

    @classmethod
    def checks(cls, text: Mapping[str, Any], vision: Mapping[str, Any]) -> list[Check]:
        return [("vision_config.attention_dropout", vision.get("attention_dropout") or 0.0, (0.0,))]

    def written_fields(self) -> dict[str, Any]:
        return {"attention_dropout": 0.0}
