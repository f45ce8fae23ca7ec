"""What a Qwen3-VL model is made of, dense or with experts, and how Hugging Face folders spell it."""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from typing import Any, Literal

from pydantic import Field, model_validator

from tessera.core.config import Section, build
from tessera.core.errors import TesseraError
from tessera.models._text import config as text_tower
from tessera.models._text.spelling import PLAIN, Spelling, but

SECTIONS = (24, 20, 20)
_FIXED = but(PLAIN, "mrope_section", attention_bias=False, qk_norm=True, mrope_interleaved=True)
_USUAL = {"rope_theta": 5e5, "mrope_section": SECTIONS}
DENSE = Spelling("qwen3_vl_text", _FIXED, {**_USUAL, "head_dim": 128})
SPARSE = Spelling("qwen3_vl_moe_text", but(_FIXED, "experts"), {**_USUAL, "head_dim": None})
# model_type of the whole -> how its text is spelled, class of transformers
SPELLINGS = {
    "qwen3_vl": (DENSE, "Qwen3VLForConditionalGeneration"),
    "qwen3_vl_moe": (SPARSE, "Qwen3VLMoeForConditionalGeneration"),
}


class TextConfig(text_tower.TextConfig):
    head_dim: int | None = Field(128, gt=0)
    qk_norm: bool = True
    rope_theta: float = Field(5e6, gt=0)
    mrope_section: tuple[int, int, int] | None = SECTIONS
    mrope_interleaved: bool = True
    max_position_embeddings: int = Field(262144, gt=0)
    bos_token_id: int | None = 151643
    eos_token_id: int | tuple[int, ...] | None = 151645


class VisionConfig(Section):
    depth: int = Field(27, gt=0)
    hidden_size: int = Field(1152, gt=0)
    intermediate_size: int = Field(4304, gt=0)
    num_heads: int = Field(16, gt=0)
    in_channels: int = Field(3, gt=0)
    patch_size: int = Field(16, gt=0)
    spatial_merge_size: int = Field(2, gt=0)
    temporal_patch_size: int = Field(2, gt=0)
    num_position_embeddings: int = Field(2304, gt=0, description="entries of the table of positions, a square")
    deepstack_visual_indexes: tuple[int, ...] = Field(
        (8, 16, 24), description="blocks whose features are added after the first, second ... layer of the text"
    )
    hidden_act: Literal["gelu_pytorch_tanh", "gelu", "quick_gelu", "silu"] = "gelu_pytorch_tanh"
    rope_theta: float = Field(1e4, gt=0)

    @property
    def patch_values(self) -> int:
        """Numbers in one flattened patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def table_side(self) -> int:
        return isqrt(self.num_position_embeddings)

    @model_validator(mode="after")
    def _fits(self) -> VisionConfig:
        if self.hidden_size % (4 * self.num_heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} over {self.num_heads} heads must give a multiple of 4: half of each "
                "head turns with the height, half with the width"
            )
        if self.table_side**2 != self.num_position_embeddings:
            raise ValueError(f"num_position_embeddings {self.num_position_embeddings} is not the square of a number")
        taps = self.deepstack_visual_indexes
        if list(taps) != sorted(set(taps)) or any(not 0 <= tap < self.depth for tap in taps):
            raise ValueError(f"deepstack_visual_indexes {list(taps)} must grow and be below depth {self.depth}")
        return self


class Qwen3VLConfig(Section):
    text: TextConfig
    vision: VisionConfig = Field(default_factory=lambda: VisionConfig.model_validate({}))
    tie_word_embeddings: bool = False
    image_token_id: int = Field(151655, ge=0)
    video_token_id: int = Field(151656, ge=0)
    vision_start_token_id: int = Field(151652, ge=0)
    vision_end_token_id: int = Field(151653, ge=0)
    attention: str = Field("auto", description="implementation of attention: auto, eager, sdpa or varlen")

    @model_validator(mode="after")
    def _fits(self) -> Qwen3VLConfig:
        for name in _ROOT_FIELDS:
            if getattr(self, name) >= self.text.vocab_size:
                raise ValueError(f"{name} {getattr(self, name)} is outside the vocabulary of {self.text.vocab_size}")
        taps, layers = len(self.vision.deepstack_visual_indexes), self.text.num_hidden_layers
        if taps > layers:
            raise ValueError(f"features of {taps} blocks are to be added after as many layers, the text has {layers}")
        return self

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> Qwen3VLConfig:
        kind = str(data.get("model_type"))
        if kind not in SPELLINGS:
            raise TesseraError(f"model_type {kind!r} is another family", where="config.json", allowed=SPELLINGS)
        where = f"config.json ({kind})"
        text, vision = dict(data.get("text_config") or {}), data.get("vision_config") or {}
        _refuse_unsupported(data, text, vision, where)
        fields = {name: data[name] for name in _ROOT_FIELDS if data.get(name) is not None}
        # The whole model says whether its head is tied: what the text says of itself is a default of its class.
        fields["tie_word_embeddings"] = bool(data.get("tie_word_embeddings"))
        read = SPELLINGS[kind][0].read(text, where)
        return build(cls, {**fields, "text": read, "vision": _vision_fields(vision)}, where)

    def to_hf(self) -> dict[str, Any]:
        """The config.json that transformers 5 writes and reads."""
        text = self.text
        kind = "qwen3_vl" if text.experts is None else "qwen3_vl_moe"
        if text.experts is not None and not text.experts.norm_topk_prob:
            raise TesseraError(
                f"in a {kind} the weights of a token's experts add up to one",
                where="model.config.text.experts.norm_topk_prob",
                fix="leave it as it is in the family, or do without an export",
            )
        spelling, architecture = SPELLINGS[kind]
        return {
            "architectures": [architecture],
            "model_type": kind,
            **{name: getattr(self, name) for name in _ROOT_FIELDS},
            "tie_word_embeddings": self.tie_word_embeddings,
            "text_config": {**spelling.write(text), "tie_word_embeddings": self.tie_word_embeddings},
            "vision_config": {
                "model_type": f"{kind}_vision",
                **self.vision.model_dump(mode="json", exclude={"rope_theta"}),
                "out_hidden_size": text.hidden_size,
                "initializer_range": text.initializer_range,
                "rope_parameters": {"rope_type": "axial", "rope_theta": self.vision.rope_theta},
            },
        }


_ROOT_FIELDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def _vision_fields(vision: Mapping[str, Any]) -> dict[str, Any]:
    fields = {name: vision[name] for name in VisionConfig.model_fields if name in vision and name != "rope_theta"}
    theta = (vision.get("rope_parameters") or {}).get("rope_theta")
    return fields if theta is None else {**fields, "rope_theta": theta}


def _refuse_unsupported(
    data: Mapping[str, Any], text: Mapping[str, Any], vision: Mapping[str, Any], where: str
) -> None:
    """Values that change what the model computes and that we do not compute are errors, not surprises."""
    hidden = text.get("hidden_size")
    checks: tuple[tuple[str, Any, tuple[Any, ...]], ...] = (
        ("norm_topk_prob", text.get("norm_topk_prob", True), (True,)),
        ("vision_config.out_hidden_size", vision.get("out_hidden_size", hidden), (hidden,)),
        ("vision_config rope type", (vision.get("rope_parameters") or {}).get("rope_type", "axial"), ("axial",)),
        ("quantization_config", data.get("quantization_config"), (None,)),
    )
    for name, value, allowed in checks:
        if value not in allowed:
            raise TesseraError(f"{name} = {value!r} is not supported", where=where, allowed=allowed)
