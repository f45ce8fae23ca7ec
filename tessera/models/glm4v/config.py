"""The configuration of GLM-4.1V, and its form in the config.json of Hugging Face folders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from tessera.config.reader import build
from tessera.models.text.decoder import TextConfig
from tessera.models.text.hf import PLAIN_TEXT, Check, HFTextFormat, check_supported, hf_defaults, override
from tessera.models.vision.family import GridVisionConfig, VisionLanguageConfig, rope_type

DEFAULT_SECTIONS = (8, 12, 12)
WHERE = "config.json (glm4v)"
TEXT = HFTextFormat(
    "glm4v_text",
    override(PLAIN_TEXT, "mrope_section", "partial_rotary_factor", sandwich_norm=True, attention_bias=True),
    # A folder that says nothing of its share of turning numbers turns them all, as in transformers.
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
        13696, gt=0, description="of the merger behind the encoder; that of its blocks is the text's width"
    )
    num_heads: int = Field(12, gt=0, le=10**8)
    image_size: int = Field(
        336, gt=0, le=10**8, description="side of the image whose patches the table of positions has"
    )
    attention_bias: bool = Field(False, description="of the product that makes queries, keys and values")
    hidden_act: Literal["silu"] = "silu"
    rms_norm_eps: float = Field(1e-5, gt=0)

    @property
    def table_side(self) -> int:
        """Return how many entries the table of positions has along each side."""
        return self.image_size // self.patch_size

    @model_validator(mode="after")
    def _divides(self) -> Glm4vVisionConfig:
        self.check_heads("hidden_size", self.num_heads)
        if self.image_size < self.patch_size:
            raise ValueError(f"image_size {self.image_size} is smaller than a patch ({self.patch_size})")
        return self


class Glm4vConfig(VisionLanguageConfig):
    token_fields: ClassVar[tuple[str, ...]] = (
        "image_token_id",
        "video_token_id",
        "image_start_token_id",
        "image_end_token_id",
        "video_start_token_id",
        "video_end_token_id",
    )

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
    def from_hf(cls, data: Mapping[str, Any]) -> Glm4vConfig:
        """From config.json: with `text_config`, or with the text's fields at the top as older folders have them."""
        text, vision = cls.text_of(data), data.get("vision_config") or {}
        width, head = TEXT.hidden_and_head(text)
        checks: list[Check] = [
            ("model_type", data.get("model_type", "glm4v"), ("glm4v",)),
            ("head_dim", text.get("head_dim") or head, (head,)),
            ("out_hidden_size", vision.get("out_hidden_size", 4096), (width,)),
            ("vision_config.attention_dropout", vision.get("attention_dropout") or 0.0, (0.0,)),
            ("vision_config rope type", rope_type(vision), ("axial",)),
        ]
        check_supported(checks, WHERE)
        fields = {"text": TEXT.read(text, WHERE), "vision": Glm4vVisionConfig.read(vision)}
        return build(cls, {**cls.read_root(data, text), **fields}, WHERE)

    def to_hf(self) -> dict[str, Any]:
        """Return the config.json that transformers 5 writes and reads."""
        beside = {
            "out_hidden_size": self.text.hidden_size,
            "attention_dropout": 0.0,
            "initializer_range": self.text.initializer_range,
        }
        return {
            **self.write_root("glm4v", "Glm4vForConditionalGeneration"),
            "text_config": TEXT.write(self.text),
            "vision_config": self.vision.write("glm4v_vision", **beside),
        }
