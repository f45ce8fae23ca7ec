"""What a GLM-4.1V model is made of, and how Hugging Face folders spell it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from tessera.core.config import Section, build
from tessera.core.errors import TesseraError
from tessera.models._text import config as text_tower
from tessera.models._text.spelling import PLAIN, Spelling, but

DEFAULT_SECTIONS = (8, 12, 12)
WHERE = "config.json (glm4v)"
TEXT = Spelling(
    "glm4v_text",
    but(PLAIN, "mrope_section", "partial_rotary_factor", sandwich_norm=True, attention_bias=True),
    # A folder that says nothing of its share of turning numbers turns them all, as in transformers.
    {"rms_norm_eps": 1e-5, "mrope_section": DEFAULT_SECTIONS, "partial_rotary_factor": 1.0},
    silent=("attention_bias", "head_dim"),
)


class TextConfig(text_tower.TextConfig):
    attention_bias: bool = True
    sandwich_norm: bool = True
    rms_norm_eps: float = Field(1e-5, gt=0)
    partial_rotary_factor: float = Field(0.5, gt=0, le=1)
    mrope_section: tuple[int, int, int] | None = DEFAULT_SECTIONS
    eos_token_id: int | tuple[int, ...] | None = (151329, 151336, 151338, 151348)
    pad_token_id: int | None = 151329


class VisionConfig(Section):
    depth: int = Field(24, gt=0)
    hidden_size: int = Field(1536, gt=0)
    intermediate_size: int = Field(
        13696, gt=0, description="of the merger behind the tower; that of its blocks is the text's width"
    )
    num_heads: int = Field(12, gt=0)
    in_channels: int = Field(3, gt=0)
    image_size: int = Field(336, gt=0, description="side of the picture whose patches the table of positions has")
    patch_size: int = Field(14, gt=0)
    spatial_merge_size: int = Field(2, gt=0)
    temporal_patch_size: int = Field(2, gt=0)
    attention_bias: bool = Field(False, description="of the product that makes queries, keys and values")
    hidden_act: Literal["silu"] = "silu"
    rms_norm_eps: float = Field(1e-5, gt=0)
    rope_theta: float = Field(1e4, gt=0)

    @property
    def patch_values(self) -> int:
        """Numbers in one flattened patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def table_side(self) -> int:
        """Entries of the table of positions along each side."""
        return self.image_size // self.patch_size

    @model_validator(mode="after")
    def _divides(self) -> VisionConfig:
        if self.hidden_size % (4 * self.num_heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} over {self.num_heads} heads must give a multiple of 4: half of each "
                "head turns with the height, half with the width"
            )
        if self.image_size < self.patch_size:
            raise ValueError(f"image_size {self.image_size} is smaller than a patch ({self.patch_size})")
        return self


class Glm4vConfig(Section):
    text: TextConfig
    vision: VisionConfig = Field(default_factory=lambda: VisionConfig.model_validate({}))
    tie_word_embeddings: bool = False
    image_token_id: int = Field(151343, ge=0)
    video_token_id: int = Field(151344, ge=0)
    image_start_token_id: int = Field(151339, ge=0)
    image_end_token_id: int = Field(151340, ge=0)
    video_start_token_id: int = Field(151341, ge=0)
    video_end_token_id: int = Field(151342, ge=0)
    attention: str = Field("auto", description="implementation of attention: auto, eager, sdpa or varlen")

    @model_validator(mode="after")
    def _tokens_exist(self) -> Glm4vConfig:
        for name in _TOKENS:
            if getattr(self, name) >= self.text.vocab_size:
                raise ValueError(f"{name} {getattr(self, name)} is outside the vocabulary of {self.text.vocab_size}")
        return self

    @property
    def end_tokens(self) -> tuple[int, ...]:
        ends = self.text.eos_token_id
        return () if ends is None else (ends,) if isinstance(ends, int) else ends

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> Glm4vConfig:
        """From config.json: with `text_config`, or with the text's fields at the top as older folders have them."""
        text = {**data, **data["text_config"]} if isinstance(data.get("text_config"), Mapping) else dict(data)
        vision = data.get("vision_config") or {}
        _refuse_unsupported(data, text, vision)
        fields = {name: data[name] for name in _TOKENS if data.get(name) is not None}
        # Releases of transformers before 5 kept the tie inside text_config.
        fields["tie_word_embeddings"] = bool(data.get("tie_word_embeddings") or text.get("tie_word_embeddings"))
        return build(cls, {**fields, "text": TEXT.read(text, WHERE), "vision": _vision_fields(vision)}, WHERE)

    def to_hf(self) -> dict[str, Any]:
        """The config.json that transformers 5 writes and reads."""
        text, vision = self.text, self.vision
        return {
            "architectures": ["Glm4vForConditionalGeneration"],
            "model_type": "glm4v",
            **{name: getattr(self, name) for name in _TOKENS},
            "tie_word_embeddings": self.tie_word_embeddings,
            "text_config": TEXT.write(text),
            "vision_config": {
                "model_type": "glm4v_vision",
                **vision.model_dump(mode="json", exclude={"rope_theta"}),
                "out_hidden_size": text.hidden_size,
                "attention_dropout": 0.0,
                "initializer_range": text.initializer_range,
                "rope_parameters": {"rope_type": "axial", "rope_theta": vision.rope_theta},
            },
        }


_TOKENS = (
    "image_token_id",
    "video_token_id",
    "image_start_token_id",
    "image_end_token_id",
    "video_start_token_id",
    "video_end_token_id",
)


def _vision_fields(vision: Mapping[str, Any]) -> dict[str, Any]:
    fields = {name: vision[name] for name in VisionConfig.model_fields if name in vision and name != "rope_theta"}
    theta = (vision.get("rope_parameters") or {}).get("rope_theta")
    return fields if theta is None else {**fields, "rope_theta": theta}


def _refuse_unsupported(data: Mapping[str, Any], text: Mapping[str, Any], vision: Mapping[str, Any]) -> None:
    """Values that change what the model computes and that we do not compute are errors, not surprises."""
    head = text.get("hidden_size", 0) / (text.get("num_attention_heads") or 1)
    checks: tuple[tuple[str, Any, tuple[Any, ...]], ...] = (
        ("model_type", data.get("model_type", "glm4v"), ("glm4v",)),
        ("head_dim", text.get("head_dim") or head, (head,)),
        ("out_hidden_size", vision.get("out_hidden_size", text.get("hidden_size")), (text.get("hidden_size"),)),
        ("vision_config.attention_dropout", vision.get("attention_dropout") or 0.0, (0.0,)),
        ("vision_config rope type", (vision.get("rope_parameters") or {}).get("rope_type", "axial"), ("axial",)),
    )
    for name, value, allowed in checks:
        if value not in allowed:
            raise TesseraError(f"{name} = {value!r} is not supported", where=WHERE, allowed=allowed)
