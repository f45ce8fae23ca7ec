"""The configuration of LLaVA 1.5 and LLaVA-OneVision (with tiles), read from and written to config.json."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from tessera.config.reader import Section, build
from tessera.errors import TesseraError
from tessera.models.text.decoder import TextConfig
from tessera.models.text.hf import check_model_type, check_supported, read_language, write_language
from tessera.ops.attention import AttentionBackend

PLAIN_TYPE, TILED_TYPE = "llava", "llava_onevision"
_SIDES = (384, 768, 1152, 1536, 1920, 2304)
PINPOINTS = tuple((height, width) for height in _SIDES for width in _SIDES)
_ANYRES = "anyres_max_"

_TOWERS = {"clip_vision_model": "clip", "siglip_vision_model": "siglip"}
_VISION_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "clip": {"patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
    "siglip": {"patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
}
# Vision settings of a config.json that has no vision_config.
_NO_VISION: Mapping[str, Mapping[str, Any]] = {
    PLAIN_TYPE: {
        "model_type": "clip_vision_model",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": 336,
        "patch_size": 14,
    },
    TILED_TYPE: {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 26,
        "num_attention_heads": 16,
        "image_size": 384,
        "patch_size": 14,
        "vision_use_head": False,
    },
}


class LlavaVisionConfig(Section):
    """Configure a CLIP encoder (with a class token and a norm before the blocks) or a SigLIP encoder."""

    kind: Literal["clip", "siglip"]
    hidden_size: int = Field(768, gt=0, le=10**8)
    intermediate_size: int = Field(3072, gt=0, le=10**8)
    num_hidden_layers: int = Field(12, gt=0, le=10**4)
    num_attention_heads: int = Field(12, gt=0, le=10**8)
    num_channels: int = Field(3, gt=0, le=10**8)
    image_size: int = Field(224, gt=0, le=10**8, description="side of the square input images, in pixels")
    patch_size: int = Field(14, gt=0, le=10**8)
    hidden_act: Literal["quick_gelu", "gelu", "gelu_pytorch_tanh"] = "quick_gelu"
    layer_norm_eps: float = Field(1e-5, gt=0)

    @property
    def patch_values(self) -> int:
        """Return the number of values in one flattened patch."""
        return self.num_channels * self.patch_size**2

    @property
    def side(self) -> int:
        """Return the number of patches along a side of an image. Pixels that fill no patch are dropped."""
        return self.image_size // self.patch_size

    @property
    def class_token(self) -> bool:
        return self.kind == "clip"

    @property
    def patches(self) -> int:
        """Return the number of patches of each image, class token included."""
        return self.side**2 + self.class_token

    @model_validator(mode="after")
    def _divides(self) -> LlavaVisionConfig:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(f"hidden_size {self.hidden_size} does not split into {self.num_attention_heads} heads")
        if self.side == 0:
            raise ValueError(f"patch_size {self.patch_size} is more than image_size {self.image_size}")
        return self


class TilesConfig(Section):
    """Configure how a single image is cut into tiles: by the listed resolution that keeps most of its pixels."""

    pinpoints: tuple[tuple[int, int], ...] = Field(PINPOINTS, min_length=1, description="resolutions, height and width")
    most: int = Field(
        9,
        gt=0,
        le=10**8,
        description="limit on the tokens of tiles, in tokens of one tile; above 1.21 times it they are scaled down",
    )


class LlavaConfig(Section):
    text: TextConfig
    vision: LlavaVisionConfig
    tiles: TilesConfig | None = Field(None, description="for LLaVA-OneVision; null: LLaVA 1.5, which reads no videos")
    tie_word_embeddings: bool = False
    image_token_id: int = Field(32000, ge=0)
    video_token_id: int | None = Field(None, ge=0, description="with tiles")
    vision_feature_layer: int = Field(-2, description="block whose features are used; 1 is the first, -1 the last")
    vision_feature_select_strategy: Literal["default", "full"] = Field(
        "default", description="default: without the first patch of each image, the class token"
    )
    projector_hidden_act: Literal["quick_gelu", "gelu", "gelu_pytorch_tanh", "silu"] = "gelu"
    multimodal_projector_bias: bool = True
    attention: AttentionBackend = Field("auto", description="implementation of attention")

    @property
    def blocks_read(self) -> int:
        """Return how many blocks of the vision encoder are computed, up to `vision_feature_layer`."""
        layers, chosen = self.vision.num_hidden_layers, self.vision_feature_layer
        return chosen if chosen >= 0 else layers + 1 + chosen

    @property
    def first_feature(self) -> int:
        return 1 if self.vision_feature_select_strategy == "default" else 0

    @property
    def features(self) -> int:
        """Return the number of features of an image that become tokens."""
        return self.vision.patches - self.first_feature

    @model_validator(mode="after")
    def _fits(self) -> LlavaConfig:
        self.text.check_tokens({"image_token_id": self.image_token_id, "video_token_id": self.video_token_id})
        if not 1 <= self.blocks_read <= self.vision.num_hidden_layers:
            layers = self.vision.num_hidden_layers
            raise ValueError(
                f"vision_feature_layer {self.vision_feature_layer} is not one of the encoder's {layers} blocks"
            )
        if (self.tiles is None) != (self.video_token_id is None):
            raise ValueError("set both tiles and video_token_id, or neither")
        if self.tiles is not None:
            self._check_tiles(self.tiles)
        return self

    def _check_tiles(self, tiles: TilesConfig) -> None:
        side = self.vision.side
        if self.features != side**2:
            raise ValueError(
                f"vision_feature_select_strategy {self.vision_feature_select_strategy!r} keeps {self.features} "
                f"features of the {side}x{side} patches of a tile, but tiles need one per patch"
            )
        for height, width in tiles.pinpoints:
            if height <= 0 or width <= 0 or height % self.vision.image_size or width % self.vision.image_size:
                raise ValueError(
                    f"tiles of {self.vision.image_size} pixels do not fill a resolution of {height}x{width}"
                )

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> LlavaConfig:
        kind = str(data.get("model_type"))
        check_model_type(kind, _NO_VISION)
        where = f"config.json ({kind})"
        tiled = kind == TILED_TYPE
        text = dict(data.get("text_config") or {})
        fields: dict[str, Any] = {name: data[name] for name in _PLAIN_FIELDS if data.get(name) is not None}
        fields |= {
            "text": read_language(text, "qwen2" if tiled else "llama", where),
            "vision": _read_vision(data.get("vision_config") or _NO_VISION[kind], where),
            # transformers 4 wrote tie_word_embeddings into text_config.
            "tie_word_embeddings": bool(data.get("tie_word_embeddings") or text.get("tie_word_embeddings")),
            "image_token_id": _either(data, "image_token_index", "image_token_id", 151646 if tiled else 32000),
            "vision_feature_layer": _one_layer(data.get("vision_feature_layer", -1 if tiled else -2), where),
            "vision_feature_select_strategy": data.get("vision_feature_select_strategy")
            or ("full" if tiled else "default"),
        }
        if tiled:
            fields["video_token_id"] = _either(data, "video_token_index", "video_token_id", 151647)
            fields["tiles"] = {"most": _most(data.get("vision_aspect_ratio", f"{_ANYRES}9"), where)}
            if data.get("image_grid_pinpoints") is not None:
                fields["tiles"]["pinpoints"] = data["image_grid_pinpoints"]
        return build(cls, fields, where)

    def to_hf(self) -> dict[str, Any]:
        """Return the config.json that transformers 5 writes and reads."""
        plain = {name: getattr(self, name) for name in _PLAIN_FIELDS}
        fields: dict[str, Any] = {
            **plain,
            "tie_word_embeddings": self.tie_word_embeddings,
            "image_token_index": self.image_token_id,
            "vision_feature_layer": self.vision_feature_layer,
            "vision_feature_select_strategy": self.vision_feature_select_strategy,
            "text_config": write_language(self.text, "llama", self.tie_word_embeddings),
            "vision_config": _write_vision(self.vision),
        }
        if self.tiles is None:
            head = {"architectures": ["LlavaForConditionalGeneration"], "model_type": PLAIN_TYPE}
            return {**head, **fields, "image_seq_length": self.features}
        return {
            "architectures": ["LlavaOnevisionForConditionalGeneration"],
            "model_type": TILED_TYPE,
            **fields,
            "video_token_index": self.video_token_id,
            "image_grid_pinpoints": [list(size) for size in self.tiles.pinpoints],
            "vision_aspect_ratio": f"{_ANYRES}{self.tiles.most}",
        }


_PLAIN_FIELDS = ("projector_hidden_act", "multimodal_projector_bias")


def _either(data: Mapping[str, Any], name: str, other: str, default: int) -> int:
    value = data.get(name, data.get(other))
    return default if value is None else int(value)


def _read_vision(vision: Mapping[str, Any], where: str) -> dict[str, Any]:
    model_type = vision.get("model_type")
    check_supported(
        [
            ("vision_config.model_type", model_type, tuple(_TOWERS)),
            ("vision_config.attention_dropout", vision.get("attention_dropout") or 0.0, (0.0,)),
        ],
        where,
    )
    kind = _TOWERS[str(model_type)]
    if kind == "siglip" and vision.get("vision_use_head", True):
        raise TesseraError(
            "vision_config.vision_use_head is true: the weights of this head do not affect the output",
            where=where,
            fix="set vision_use_head to false, as in published folders, and delete the weights vision_tower.*.head.*",
            code="model.unused-vision-head",
        )
    fields = {name: vision[name] for name in LlavaVisionConfig.model_fields if vision.get(name) is not None}
    return {**_VISION_DEFAULTS[kind], **fields, "kind": kind}


def _write_vision(vision: LlavaVisionConfig) -> dict[str, Any]:
    plain = vision.model_dump(mode="json", exclude={"kind"})
    if vision.kind == "clip":
        return {"model_type": "clip_vision_model", **plain, "attention_dropout": 0.0, "projection_dim": 768}
    return {"model_type": "siglip_vision_model", **plain, "attention_dropout": 0.0, "vision_use_head": False}


def _one_layer(layer: Any, where: str) -> int:
    if isinstance(layer, list) and len(layer) == 1:
        (layer,) = layer
    if not isinstance(layer, int):
        check_supported([("vision_feature_layer", layer, ("one layer",))], where)
    return int(layer)


def _most(ratio: Any, where: str) -> int:
    match = re.fullmatch(_ANYRES + r"(\d+)", str(ratio))
    if match is None:
        check_supported([("vision_aspect_ratio", ratio, (f"{_ANYRES}9",))], where)
    return int(str(ratio).removeprefix(_ANYRES))
