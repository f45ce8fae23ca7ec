"""What a Qwen2.5-VL model is made of, and how Hugging Face folders spell it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from tessera.core.config import Section, build
from tessera.core.errors import TesseraError
from tessera.models._text.spelling import NO_WINDOW, PLAIN, Spelling, but
from tessera.models.qwen2_vl.config import DEFAULT_SECTIONS, TextConfig

WHERE = "config.json (qwen2_5_vl)"
TEXT = Spelling(
    "qwen2_5_vl_text",
    but(PLAIN, "mrope_section", attention_bias=True),
    {"rope_theta": 1e6, "mrope_section": DEFAULT_SECTIONS, "rms_norm_eps": 1e-5},
    silent=("attention_bias", "head_dim"),
    extra=NO_WINDOW,
)
_SILENT = {"hidden_size": 3584, "tokens_per_second": 4}  # what a folder means that does not say


class VisionConfig(Section):
    depth: int = Field(32, gt=0)
    hidden_size: int = Field(1280, gt=0)
    intermediate_size: int = Field(3420, gt=0)
    num_heads: int = Field(16, gt=0)
    in_channels: int = Field(3, gt=0)
    patch_size: int = Field(14, gt=0)
    spatial_merge_size: int = Field(2, gt=0)
    temporal_patch_size: int = Field(2, gt=0)
    tokens_per_second: int = Field(2, gt=0, description="positions along time that a second of a clip takes")
    window_size: int = Field(112, gt=0, description="pixels along each side of a window")
    fullatt_block_indexes: tuple[int, ...] = Field((7, 15, 23, 31), description="blocks that see whole frames")
    hidden_act: Literal["silu", "gelu", "gelu_pytorch_tanh", "quick_gelu"] = "silu"
    rope_theta: float = Field(1e4, gt=0)

    @property
    def patch_values(self) -> int:
        """Numbers in one flattened patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def window(self) -> int:
        """Tokens along each side of a window: so many blocks of patches that are merged."""
        return self.window_size // self.spatial_merge_size // self.patch_size

    @property
    def full(self) -> tuple[int, ...]:
        """Of the blocks that exist, those that see whole frames."""
        return tuple(number for number in self.fullatt_block_indexes if number < self.depth)

    @model_validator(mode="after")
    def _divides(self) -> VisionConfig:
        if self.hidden_size % (4 * self.num_heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} over {self.num_heads} heads must give a multiple of 4: half of each "
                "head turns with the height, half with the width"
            )
        if self.window < 1:
            raise ValueError(
                f"a window of {self.window_size} pixels is smaller than one token, "
                f"{self.patch_size * self.spatial_merge_size} pixels along each side"
            )
        return self


class Qwen25VLConfig(Section):
    text: TextConfig
    vision: VisionConfig = Field(default_factory=lambda: VisionConfig.model_validate({}))
    tie_word_embeddings: bool = False
    image_token_id: int = Field(151655, ge=0)
    video_token_id: int = Field(151656, ge=0)
    vision_start_token_id: int = Field(151652, ge=0)
    vision_end_token_id: int = Field(151653, ge=0)
    attention: str = Field("auto", description="implementation of attention: auto, eager, sdpa or varlen")

    @model_validator(mode="after")
    def _tokens_exist(self) -> Qwen25VLConfig:
        for name in _ROOT_FIELDS:
            if getattr(self, name) >= self.text.vocab_size:
                raise ValueError(f"{name} {getattr(self, name)} is outside the vocabulary of {self.text.vocab_size}")
        return self

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> Qwen25VLConfig:
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
        return {
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "model_type": "qwen2_5_vl",
            **{name: getattr(self, name) for name in _ROOT_FIELDS},
            "tie_word_embeddings": self.tie_word_embeddings,
            "text_config": TEXT.write(text),
            "vision_config": {
                "model_type": "qwen2_5_vl_vision",
                **vision.model_dump(mode="json", exclude={"rope_theta"}),
                "out_hidden_size": text.hidden_size,
                "initializer_range": text.initializer_range,
                "rope_parameters": {"rope_type": "axial", "rope_theta": vision.rope_theta},
            },
        }


_ROOT_FIELDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def _vision_fields(vision: Mapping[str, Any]) -> dict[str, Any]:
    told = {**_SILENT, **vision}
    fields = {name: told[name] for name in VisionConfig.model_fields if name in told and name != "rope_theta"}
    if "in_channels" not in vision and "in_chans" in vision:  # the hub's spelling
        fields["in_channels"] = vision["in_chans"]
    theta = (vision.get("rope_parameters") or {}).get("rope_theta")
    return fields if theta is None else {**fields, "rope_theta": theta}


def _refuse_unsupported(data: Mapping[str, Any], text: Mapping[str, Any], vision: Mapping[str, Any]) -> None:
    """Values that change what the model computes and that we do not compute are errors, not surprises."""
    width = text.get("hidden_size")
    head = (width or 0) / (text.get("num_attention_heads") or 1)
    checks: tuple[tuple[str, Any, tuple[Any, ...]], ...] = (
        ("model_type", data.get("model_type", "qwen2_5_vl"), ("qwen2_5_vl",)),
        ("head_dim", text.get("head_dim") or head, (head,)),
        ("vision_config.out_hidden_size", vision.get("out_hidden_size", 3584), (width,)),
        ("vision_config rope type", (vision.get("rope_parameters") or {}).get("rope_type", "axial"), ("axial",)),
    )
    for name, value, allowed in checks:
        if value not in allowed:
            raise TesseraError(f"{name} = {value!r} is not supported", where=WHERE, allowed=allowed)
