"""Configurations of families whose vision encoder reads a grid of patches, and their form in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from tessera.config.reader import Section, build
from tessera.models.text.decoder import TextConfig
from tessera.models.text.hf import Check, HFTextFormat, check_model_type, check_supported
from tessera.ops.attention import AttentionBackend


class GridVisionConfig(Section):
    """Configure a vision encoder for images of any size, with rotary positions along height and width."""

    width_field: ClassVar[str] = "hidden_size"

    depth: int = Field(gt=0, le=10**4)
    num_heads: int = Field(gt=0, le=10**8)
    in_channels: int = Field(3, gt=0, le=10**8)
    patch_size: int = Field(14, gt=0, le=10**8)
    spatial_merge_size: int = Field(2, gt=0, le=10**8)
    temporal_patch_size: int = Field(2, gt=0, le=10**8)
    rope_theta: float = Field(1e4, gt=0)

    @property
    def patch_values(self) -> int:
        """Return the number of values in one flattened patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def width(self) -> int:
        """Return the hidden size of the vision encoder."""
        return int(getattr(self, self.width_field))

    @model_validator(mode="after")
    def _fits_heads(self) -> Self:
        if self.width % (4 * self.num_heads):
            raise ValueError(
                f"{self.width_field} {self.width} / {self.num_heads} heads must be a multiple of 4: half of a head "
                "is rotated by the row of a patch, half by its column"
            )
        return self

    @classmethod
    def read(cls, vision: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of this class from the `vision_config` of a config.json."""
        fields = {name: vision[name] for name in cls.model_fields if name in vision and name != "rope_theta"}
        if "in_channels" not in vision and "in_chans" in vision:  # old name of the field
            fields["in_channels"] = vision["in_chans"]
        theta = (vision.get("rope_parameters") or {}).get("rope_theta", vision.get("rope_theta"))
        return fields if theta is None else {**fields, "rope_theta": theta}

    def write(self, model_type: str, **more: Any) -> dict[str, Any]:
        """Return the `vision_config` of a config.json."""
        rope = {"rope_type": "axial", "rope_theta": self.rope_theta}
        plain = self.model_dump(mode="json", exclude={"rope_theta"})
        return {"model_type": model_type, **plain, **more, "rope_parameters": rope}


class VisionLanguageConfig(Section):
    """Configure a family with a `GridVisionConfig` encoder; read and write its config.json."""

    # model_type in config.json -> text format and class name of transformers
    formats: ClassVar[Mapping[str, tuple[HFTextFormat, str]]]
    # (field of `vision_config` with the width of the text decoder, default of that field)
    output_field: ClassVar[tuple[str, int]] = ("out_hidden_size", 3584)
    # defaults of transformers that differ from the defaults of a recipe
    vision_defaults: ClassVar[Mapping[str, Any]] = {}
    tie_in_text: ClassVar[bool] = True  # transformers 4 wrote tie_word_embeddings into text_config
    token_fields: ClassVar[Mapping[str, str]]  # field with the id of a special token -> the token

    text: TextConfig
    vision: GridVisionConfig
    tie_word_embeddings: bool = False
    attention: AttentionBackend = Field("auto", description="implementation of attention")

    @model_validator(mode="after")
    def _tokens_exist(self) -> VisionLanguageConfig:
        self.text.check_tokens({name: getattr(self, name) for name in self.token_fields})
        return self

    @property
    def special_token_ids(self) -> dict[str, int]:
        return {word: getattr(self, name) for name, word in self.token_fields.items()}

    @classmethod
    def checks(cls, text: Mapping[str, Any], vision: Mapping[str, Any]) -> list[Check]:
        """Return checks of the config.json fields for which the family supports only some values."""
        return []

    def written_fields(self) -> dict[str, Any]:
        """Return the fields, with values, that transformers writes to `vision_config` of this family only."""
        return {}

    @property
    def model_type(self) -> str:
        return next(iter(self.formats))

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> Self:
        """Read a config.json, with the text fields in `text_config` or at the top level."""
        kind = str(data.get("model_type", next(iter(cls.formats))))
        check_model_type(kind, cls.formats)
        where, text_format = f"config.json ({kind})", cls.formats[kind][0]
        text = dict(data["text_config"] if isinstance(data.get("text_config"), Mapping) else data)
        vision = data.get("vision_config") or {}
        width, head = text_format.hidden_and_head(text)
        output, default = cls.output_field
        rope = (vision.get("rope_parameters") or {}).get("rope_type", "axial")
        checks: list[Check] = [
            *cls.checks(text, vision),
            (f"vision_config.{output}", vision.get(output, default), (width,)),
            ("vision_config rope type", rope, ("axial",)),
        ]
        if "head_dim" in text_format.omitted_fields:
            checks.append(("head_dim", text.get("head_dim") or head, (head,)))
        check_supported(checks, where)
        tied = data.get("tie_word_embeddings") or (cls.tie_in_text and text.get("tie_word_embeddings"))
        vision_config: Any = cls.model_fields["vision"].annotation
        fields = {
            **{name: data[name] for name in cls.token_fields if data.get(name) is not None},
            "tie_word_embeddings": bool(tied),
            "text": text_format.read(text, where),
            "vision": vision_config.read({**cls.vision_defaults, **vision}),
        }
        return build(cls, fields, where)

    def to_hf(self) -> dict[str, Any]:
        """Return the config.json that transformers 5 writes and reads."""
        kind, text = self.model_type, self.text
        text_format, architecture = self.formats[kind]
        tie = {} if self.tie_in_text else {"tie_word_embeddings": self.tie_word_embeddings}
        return {
            "architectures": [architecture],
            "model_type": kind,
            **{name: getattr(self, name) for name in self.token_fields},
            "tie_word_embeddings": self.tie_word_embeddings,
            "text_config": {**text_format.write(text), **tie},
            "vision_config": self.vision.write(
                f"{kind}_vision",
                **{self.output_field[0]: text.hidden_size, **self.written_fields()},
                initializer_range=text.initializer_range,
            ),
        }


class QwenVLConfig(VisionLanguageConfig):
    """Declare the special tokens of the Qwen-VL models."""

    token_fields: ClassVar[Mapping[str, str]] = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }

    image_token_id: int = Field(151655, ge=0)
    video_token_id: int = Field(151656, ge=0)
    vision_start_token_id: int = Field(151652, ge=0)
    vision_end_token_id: int = Field(151653, ge=0)
