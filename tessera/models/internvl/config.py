"""The configuration of InternVL, and its form in the config.json of Hugging Face folders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from tessera.config.reader import Section, build
from tessera.errors import TesseraError
from tessera.models.text.decoder import TextConfig
from tessera.models.text.hf import LANGUAGE_FORMATS, check_supported, write_language
from tessera.ops.attention import AttentionBackend

WHERE = "config.json (internvl)"


class InternVLVisionConfig(Section):
    hidden_size: int = Field(1024, gt=0, le=10**8)
    intermediate_size: int = Field(4096, gt=0, le=10**8)
    num_hidden_layers: int = Field(24, gt=0, le=10**4)
    num_attention_heads: int = Field(16, gt=0, le=10**8)
    attention_bias: bool = Field(False, description="bias of query, key and value projections")
    use_qk_norm: bool = Field(False, description="RMS norm of queries and keys over all heads together")
    norm_type: Literal["layer_norm", "rms_norm"] = "layer_norm"
    layer_norm_eps: float = Field(1e-6, gt=0)
    hidden_act: Literal["gelu", "gelu_pytorch_tanh", "quick_gelu", "silu"] = "gelu"
    image_size: int = Field(448, gt=0, le=10**8, description="pixels along each side of a tile")
    patch_size: int = Field(14, gt=0, le=10**8)
    num_channels: int = Field(3, gt=0, le=10**8)
    layer_scale_init_value: float = Field(0.1, description="initial LayerScale of attention and MLP outputs")
    use_mean_pooling: bool = Field(True, description="no norm after the last block")
    spatial_merge_size: int = Field(
        2, gt=0, le=10**8, description="patches along each side of a block that becomes one token"
    )

    @property
    def patch_values(self) -> int:
        """Return the number of values in one flattened patch."""
        return self.num_channels * self.patch_size**2

    @property
    def side(self) -> int:
        """Return the number of patches along each side of a tile."""
        return self.image_size // self.patch_size

    @property
    def tile_patches(self) -> int:
        """Return the number of patches of a tile, class token included."""
        return self.side**2 + 1

    @property
    def tile_tokens(self) -> int:
        return (self.side // self.spatial_merge_size) ** 2

    @model_validator(mode="after")
    def _divides(self) -> InternVLVisionConfig:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(f"hidden_size {self.hidden_size} does not split into {self.num_attention_heads} heads")
        if self.image_size % (self.patch_size * self.spatial_merge_size):
            raise ValueError(
                f"image_size {self.image_size} is not a multiple of "
                f"{self.spatial_merge_size} x {self.patch_size} pixels (spatial_merge_size x patch_size)"
            )
        if not self.use_mean_pooling and self.norm_type != "layer_norm":
            raise ValueError("use_mean_pooling false needs norm_type layer_norm for the norm after the last block")
        return self


class InternVLConfig(Section):
    text: TextConfig
    vision: InternVLVisionConfig = Field(default_factory=lambda: InternVLVisionConfig.model_validate({}))
    tie_word_embeddings: bool = False
    image_token_id: int = Field(151667, ge=0)
    dynamic_rope_factor: float | None = Field(
        None,
        gt=0,
        description="factor of dynamic rope, for exports; samples beyond max_position_embeddings are refused, and "
        "shorter ones are not scaled",
    )
    attention: AttentionBackend = Field("auto", description="implementation of attention")

    @model_validator(mode="after")
    def _tokens_exist(self) -> InternVLConfig:
        self.text.check_tokens({"image_token_id": self.image_token_id})
        return self

    @property
    def max_length(self) -> int | None:
        """Return the largest number of tokens of a sample, or None if there is no limit."""
        return None if self.dynamic_rope_factor is None else self.text.max_position_embeddings

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> InternVLConfig:
        text, factor = _plain_rope(data.get("text_config") or {})
        vision = data.get("vision_config") or {}
        kind = text.get("model_type", "qwen2")
        _refuse_unsupported(data, kind, vision)
        fields: dict[str, Any] = {"tie_word_embeddings": _tied(data, text), "dynamic_rope_factor": factor}
        if data.get("image_token_id") is not None:
            fields["image_token_id"] = data["image_token_id"]
        merge = round(1 / data.get("downsample_ratio", 0.5))
        parts = {"text": LANGUAGE_FORMATS[kind].read(text, WHERE), "vision": _vision_fields(vision, merge)}
        config = build(cls, {**fields, **parts}, WHERE)
        length = data.get("image_seq_length", config.vision.tile_tokens)
        if length != config.vision.tile_tokens:
            raise TesseraError(
                f"image_seq_length is {length}, but a tile has {config.vision.tile_tokens} tokens",
                where=WHERE,
                fix="set it to (image_size / patch_size x downsample_ratio)^2",
                code="model.image-tokens-differ",
            )
        return config

    def to_hf(self) -> dict[str, Any]:
        """Return the config.json that transformers 5 writes and reads."""
        text = write_language(self.text, "qwen2", self.tie_word_embeddings)
        if self.dynamic_rope_factor is not None:
            text["rope_parameters"] |= {"rope_type": "dynamic", "factor": self.dynamic_rope_factor}
        vision = self.vision
        return {
            "architectures": ["InternVLForConditionalGeneration"],
            "model_type": "internvl",
            "image_token_id": self.image_token_id,
            "image_seq_length": vision.tile_tokens,
            "downsample_ratio": 1 / vision.spatial_merge_size,
            "projector_hidden_act": "gelu",
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "default",
            "tie_word_embeddings": self.tie_word_embeddings,
            "text_config": text,
            "vision_config": {
                "model_type": "internvl_vision",
                **vision.model_dump(mode="json", exclude={"spatial_merge_size", "image_size", "patch_size"}),
                "image_size": [vision.image_size] * 2,
                "patch_size": [vision.patch_size] * 2,
                "initializer_range": self.text.initializer_range,
                "use_absolute_position_embeddings": True,
                "use_mask_token": False,
                **dict.fromkeys(_DROPOUTS, 0.0),
            },
        }


_DROPOUTS = ("hidden_dropout_prob", "attention_dropout", "projection_dropout")


def _tied(data: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
    """Return whether the head is tied: config.json or text_config says so, and neither says the opposite.

    transformers 5 writes true, its default, at the top level even if text_config contains false. It reads such a
    folder correctly because it uses a head in the weight files, if there is one; published folders have one.
    """
    values = [part["tie_word_embeddings"] for part in (data, text) if part.get("tie_word_embeddings") is not None]
    return bool(values) and all(values)


def _plain_rope(text: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return the fields of text_config without dynamic rope scaling, and the factor of that scaling."""
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if not isinstance(rope, Mapping) or rope.get("rope_type", rope.get("type")) != "dynamic":
        return dict(text), None
    plain = {name: value for name, value in text.items() if name not in ("rope_scaling", "rope_parameters")}
    theta = text.get("rope_theta") if rope.get("rope_theta") is None else rope["rope_theta"]
    return {**plain, "rope_theta": theta}, rope.get("factor", 1.0)


def _vision_fields(vision: Mapping[str, Any], merge: int) -> dict[str, Any]:
    fields = {name: vision[name] for name in InternVLVisionConfig.model_fields if name in vision}
    for name in ("image_size", "patch_size"):
        if isinstance(fields.get(name), (list, tuple)):
            side, *others = fields[name]
            check_supported([(f"vision_config.{name}", other, (side,)) for other in others], WHERE)
            fields[name] = side
    return {**fields, "spatial_merge_size": merge}


def _refuse_unsupported(data: Mapping[str, Any], text_type: str, vision: Mapping[str, Any]) -> None:
    """Raise an error for values of config.json that are not supported."""
    checks: list[tuple[str, Any, tuple[Any, ...]]] = [
        ("model_type", data.get("model_type", "internvl"), ("internvl",)),
        ("text_config.model_type", text_type, tuple(LANGUAGE_FORMATS)),
        ("vision_config.model_type", vision.get("model_type", "internvl_vision"), ("internvl_vision",)),
        ("projector_hidden_act", data.get("projector_hidden_act", "gelu"), ("gelu",)),
        ("downsample_ratio", data.get("downsample_ratio", 0.5), (0.5, 1, 0.25)),
        ("vision_feature_layer", data.get("vision_feature_layer", -1), (-1,)),
        ("vision_feature_select_strategy", data.get("vision_feature_select_strategy", "default"), ("default",)),
        ("vision_config.use_mask_token", bool(vision.get("use_mask_token")), (False,)),
        ("use_absolute_position_embeddings", vision.get("use_absolute_position_embeddings", True), (True,)),
        *((f"vision_config.{name}", vision.get(name) or 0.0, (0.0,)) for name in _DROPOUTS),
    ]
    check_supported(checks, WHERE)
