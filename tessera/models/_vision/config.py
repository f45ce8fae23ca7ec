"""Numbers and spellings that families with pictures in grids of patches share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, model_validator

from tessera.core.config import Section
from tessera.models._text.config import TextConfig
from tessera.ops.attention import AttentionWay


class GridVisionConfig(Section):
    """A tower over patches of pictures of any size, with rotary positions over height and width."""

    in_channels: int = Field(3, gt=0, le=10**8)
    patch_size: int = Field(14, gt=0, le=10**8)
    spatial_merge_size: int = Field(2, gt=0, le=10**8)
    temporal_patch_size: int = Field(2, gt=0, le=10**8)
    rope_theta: float = Field(1e4, gt=0)

    @property
    def patch_values(self) -> int:
        """Numbers in one flattened patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    def check_heads(self, name: str, heads: int) -> None:
        """`name`: the field that holds the tower's width."""
        if getattr(self, name) % (4 * heads):
            raise ValueError(
                f"{name} {getattr(self, name)} over {heads} heads must give a multiple of 4: half of each head turns "
                "with the height, half with the width"
            )

    @classmethod
    def read(cls, vision: Mapping[str, Any]) -> dict[str, Any]:
        """Fields from the `vision_config` of a folder."""
        fields = {name: vision[name] for name in cls.model_fields if name in vision and name != "rope_theta"}
        if "in_channels" not in vision and "in_chans" in vision:  # the hub's spelling
            fields["in_channels"] = vision["in_chans"]
        theta = (vision.get("rope_parameters") or {}).get("rope_theta", vision.get("rope_theta"))
        return fields if theta is None else {**fields, "rope_theta": theta}

    def write(self, model_type: str, **more: Any) -> dict[str, Any]:
        rope = {"rope_type": "axial", "rope_theta": self.rope_theta}
        plain = self.model_dump(mode="json", exclude={"rope_theta"})
        return {"model_type": model_type, **plain, **more, "rope_parameters": rope}


def rope_type(vision: Mapping[str, Any]) -> Any:
    return (vision.get("rope_parameters") or {}).get("rope_type", "axial")


class VisionLanguageConfig(Section):
    token_fields: ClassVar[tuple[str, ...]] = (
        "image_token_id",
        "video_token_id",
        "vision_start_token_id",
        "vision_end_token_id",
    )

    text: TextConfig
    tie_word_embeddings: bool = False
    attention: AttentionWay = Field("auto", description="implementation of attention")

    @model_validator(mode="after")
    def _tokens_exist(self) -> VisionLanguageConfig:
        for name in self.token_fields:
            if getattr(self, name) >= self.text.vocab_size:
                raise ValueError(f"{name} {getattr(self, name)} is outside the vocabulary of {self.text.vocab_size}")
        return self

    @classmethod
    def text_of(cls, data: Mapping[str, Any]) -> dict[str, Any]:
        """The text's fields of a config.json: at the top, as on the hub, or in `text_config`."""
        return dict(data["text_config"] if isinstance(data.get("text_config"), Mapping) else data)

    @classmethod
    def read_root(cls, data: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
        fields = {name: data[name] for name in cls.token_fields if data.get(name) is not None}
        # Releases of transformers before 5 kept the tie inside text_config.
        tied = data.get("tie_word_embeddings") or text.get("tie_word_embeddings")
        return {**fields, "tie_word_embeddings": bool(tied)}

    def write_root(self, model_type: str, architecture: str) -> dict[str, Any]:
        return {
            "architectures": [architecture],
            "model_type": model_type,
            **{name: getattr(self, name) for name in self.token_fields},
            "tie_word_embeddings": self.tie_word_embeddings,
        }


class QwenVLConfig(VisionLanguageConfig):
    """With the words of the Qwen-VL models."""

    image_token_id: int = Field(151655, ge=0)
    video_token_id: int = Field(151656, ge=0)
    vision_start_token_id: int = Field(151652, ge=0)
    vision_end_token_id: int = Field(151653, ge=0)
