"""What a Qwen2-VL model is made of, and how Hugging Face folders spell it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from tessera.core.config import Section, build
from tessera.core.errors import TesseraError
from tessera.models._text import config as text_tower
from tessera.models._text.spelling import NO_WINDOW, PLAIN, Spelling, but

DEFAULT_SECTIONS = (16, 24, 24)
WHERE = "config.json (qwen2_vl)"
TEXT = Spelling(
    "qwen2_vl_text",
    but(PLAIN, "mrope_section", attention_bias=True),
    {"rope_theta": 1e6, "mrope_section": DEFAULT_SECTIONS},
    silent=("attention_bias", "head_dim"),
    extra=NO_WINDOW,
)


class TextConfig(text_tower.TextConfig):
    attention_bias: bool = True
    rope_theta: float = Field(1e6, gt=0)
    mrope_section: tuple[int, int, int] | None = DEFAULT_SECTIONS
    bos_token_id: int | None = 151643
    eos_token_id: int | tuple[int, ...] | None = 151645


class VisionConfig(Section):
    depth: int = Field(32, gt=0)
    embed_dim: int = Field(1280, gt=0)
    num_heads: int = Field(16, gt=0)
    mlp_ratio: int = Field(4, gt=0)
    in_channels: int = Field(3, gt=0)
    patch_size: int = Field(14, gt=0)
    spatial_merge_size: int = Field(2, gt=0)
    temporal_patch_size: int = Field(2, gt=0)
    hidden_act: Literal["quick_gelu", "gelu", "gelu_pytorch_tanh"] = "quick_gelu"
    rope_theta: float = Field(1e4, gt=0)

    @property
    def patch_values(self) -> int:
        """Numbers in one flattened patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @model_validator(mode="after")
    def _divides(self) -> VisionConfig:
        if self.embed_dim % (4 * self.num_heads):
            raise ValueError(
                f"embed_dim {self.embed_dim} over {self.num_heads} heads must give a multiple of 4: half of each head "
                "turns with the height, half with the width"
            )
        return self


class Qwen2VLConfig(Section):
    text: TextConfig
    vision: VisionConfig = Field(default_factory=lambda: VisionConfig.model_validate({}))
    tie_word_embeddings: bool = False
    image_token_id: int = Field(151655, ge=0)
    video_token_id: int = Field(151656, ge=0)
    vision_start_token_id: int = Field(151652, ge=0)
    vision_end_token_id: int = Field(151653, ge=0)
    attention: str = Field("auto", description="implementation of attention: auto, eager, sdpa or varlen")

    @model_validator(mode="after")
    def _tokens_exist(self) -> Qwen2VLConfig:
        for name in ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"):
            if getattr(self, name) >= self.text.vocab_size:
                raise ValueError(f"{name} {getattr(self, name)} is outside the vocabulary of {self.text.vocab_size}")
        return self

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> Qwen2VLConfig:
        """From config.json: either with the text's fields at the top, as on the hub, or with `text_config`."""
        text = {**data, **data["text_config"]} if isinstance(data.get("text_config"), Mapping) else dict(data)
        vision = data.get("vision_config") or {}
        _refuse_unsupported(data, text, vision)
        fields = {name: data[name] for name in _ROOT_FIELDS if data.get(name) is not None}
        # Releases of transformers before 5 kept the tie inside text_config.
        fields["tie_word_embeddings"] = bool(data.get("tie_word_embeddings") or text.get("tie_word_embeddings"))
        return build(cls, {**fields, "text": TEXT.read(text, WHERE), "vision": _vision_fields(vision)}, WHERE)

    def to_hf(self) -> dict[str, Any]:
        """The config.json that transformers 5 writes and reads."""
        text, vision = self.text, self.vision
        plain_vision = vision.model_dump(mode="json", exclude={"rope_theta"})
        return {
            "architectures": ["Qwen2VLForConditionalGeneration"],
            "model_type": "qwen2_vl",
            **{name: getattr(self, name) for name in _ROOT_FIELDS},
            "tie_word_embeddings": self.tie_word_embeddings,
            "text_config": TEXT.write(text),
            "vision_config": {
                "model_type": "qwen2_vl_vision",
                **plain_vision,
                "hidden_size": text.hidden_size,
                "initializer_range": text.initializer_range,
                "rope_parameters": {"rope_type": "axial", "rope_theta": vision.rope_theta},
            },
        }


_ROOT_FIELDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def _vision_fields(vision: Mapping[str, Any]) -> dict[str, Any]:
    fields = {name: vision[name] for name in VisionConfig.model_fields if name in vision and name != "rope_theta"}
    if "in_channels" not in vision and "in_chans" in vision:  # the hub's spelling
        fields["in_channels"] = vision["in_chans"]
    theta = (vision.get("rope_parameters") or {}).get("rope_theta")
    return fields if theta is None else {**fields, "rope_theta": theta}


def _refuse_unsupported(data: Mapping[str, Any], text: Mapping[str, Any], vision: Mapping[str, Any]) -> None:
    """Values that change what the model computes and that we do not compute are errors, not surprises."""
    head = text.get("hidden_size", 0) / (text.get("num_attention_heads") or 1)
    checks: tuple[tuple[str, Any, tuple[Any, ...]], ...] = (
        ("model_type", data.get("model_type", "qwen2_vl"), ("qwen2_vl",)),
        ("head_dim", text.get("head_dim") or head, (head,)),
        ("vision_config.hidden_size", vision.get("hidden_size", text.get("hidden_size")), (text.get("hidden_size"),)),
        ("vision_config rope type", (vision.get("rope_parameters") or {}).get("rope_type", "axial"), ("axial",)),
    )
    for name, value, allowed in checks:
        if value not in allowed:
            raise TesseraError(f"{name} = {value!r} is not supported", where=WHERE, allowed=allowed)
