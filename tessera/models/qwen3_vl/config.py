"""The configuration of Qwen3-VL, dense or with experts, and its form in the config.json of Hugging Face folders."""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from tessera.errors import TesseraError
from tessera.models.text.decoder import TextConfig
from tessera.models.text.hf import (
    PLAIN_TEXT,
    Check,
    HFTextFormat,
    hf_defaults,
    hf_expert_defaults,
    override,
)
from tessera.models.vision.config import GridVisionConfig, QwenVLConfig

SECTIONS = (24, 20, 20)
_FIXED = override(PLAIN_TEXT, "mrope_section", attention_bias=False, qk_norm=True, mrope_interleaved=True)
_ROPE = {"rope_theta": 5e5, "mrope_section": SECTIONS}
DENSE = HFTextFormat(
    "qwen3_vl_text", _FIXED, hf_defaults(151936, 4096, 22016, 32, 32, 32, 128000, head_dim=128, **_ROPE)
)
SPARSE = HFTextFormat(
    "qwen3_vl_moe_text",
    override(_FIXED, "experts"),
    hf_defaults(151936, 2048, 5632, 24, 16, 16, 128000, head_dim=None, **_ROPE),
    hf_expert_defaults(60, 4, 1408, normalized=True),
)


class Qwen3VLTextConfig(TextConfig):
    head_dim: int | None = Field(128, gt=0, le=10**8)
    qk_norm: bool = True
    rope_theta: float = Field(5e6, gt=0)
    mrope_section: tuple[int, int, int] | None = SECTIONS
    mrope_interleaved: bool = True
    max_position_embeddings: int = Field(262144, gt=0, le=10**8)
    bos_token_id: int | None = 151643
    eos_token_id: int | tuple[int, ...] | None = 151645


class Qwen3VLVisionConfig(GridVisionConfig):
    depth: int = Field(27, gt=0, le=10**4)
    hidden_size: int = Field(1152, gt=0, le=10**8)
    intermediate_size: int = Field(4304, gt=0, le=10**8)
    num_heads: int = Field(16, gt=0, le=10**8)
    patch_size: int = Field(16, gt=0, le=10**8)
    num_position_embeddings: int = Field(
        2304, gt=0, le=10**8, description="entries of the learned position embedding, a square number"
    )
    deepstack_visual_indexes: tuple[int, ...] = Field(
        (8, 16, 24), description="blocks whose features are added after the first, second ... layer of the text"
    )
    hidden_act: Literal["gelu_pytorch_tanh", "gelu", "quick_gelu", "silu"] = "gelu_pytorch_tanh"

    @property
    def table_side(self) -> int:
        return isqrt(self.num_position_embeddings)

    @model_validator(mode="after")
    def _fits(self) -> Qwen3VLVisionConfig:
        if self.table_side**2 != self.num_position_embeddings:
            raise ValueError(f"num_position_embeddings {self.num_position_embeddings} is not a square number")
        taps = self.deepstack_visual_indexes
        if list(taps) != sorted(set(taps)) or any(not 0 <= tap < self.depth for tap in taps):
            raise ValueError(f"deepstack_visual_indexes {list(taps)} must increase and be less than depth {self.depth}")
        return self


def check_taps(vision: Qwen3VLVisionConfig, text: TextConfig) -> None:
    """Raise an error if there are more DeepStack features than text layers: each is added to the output of a layer."""
    taps, layers = len(vision.deepstack_visual_indexes), text.num_hidden_layers
    if taps > layers:
        raise ValueError(
            f"deepstack_visual_indexes has {taps} entries, more than the {layers} layers of the text decoder"
        )


class Qwen3VLConfig(QwenVLConfig):
    formats: ClassVar[Mapping[str, tuple[HFTextFormat, str]]] = {
        "qwen3_vl": (DENSE, "Qwen3VLForConditionalGeneration"),
        "qwen3_vl_moe": (SPARSE, "Qwen3VLMoeForConditionalGeneration"),
    }
    tie_in_text: ClassVar[bool] = False  # tie_word_embeddings in text_config is only a default, and is not read

    text: Qwen3VLTextConfig
    vision: Qwen3VLVisionConfig = Field(default_factory=lambda: Qwen3VLVisionConfig.model_validate({}))

    @model_validator(mode="after")
    def _fits(self) -> Qwen3VLConfig:
        check_taps(self.vision, self.text)
        return self

    @classmethod
    def checks(cls, text: Mapping[str, Any], vision: Mapping[str, Any]) -> list[Check]:
        return [("norm_topk_prob", text.get("norm_topk_prob", True), (True,))]

    @property
    def model_type(self) -> str:
        return "qwen3_vl" if self.text.experts is None else "qwen3_vl_moe"

    def to_hf(self) -> dict[str, Any]:
        experts = self.text.experts
        if experts is not None and not experts.norm_topk_prob:
            raise TesseraError(
                f"norm_topk_prob is false, and transformers always normalises expert weights of {self.model_type}",
                where="model.config.text.experts.norm_topk_prob",
                fix="keep the family's value, or set checkpoint.export=false",
                code="model.not-exportable",
            )
        return super().to_hf()
