"""What vision-language families share: configuration, parallel plan and parameter names of vision encoders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, ClassVar

from pydantic import Field, model_validator
from torch import nn

from tessera.config.reader import Section
from tessera.core.model_plan import ModelPlan, PipelineUnit, StageActivation, Stream, TensorStyle
from tessera.models.text.costs import VisionCosts
from tessera.models.text.decoder import (
    ATTENTION,
    BLOCKS,
    TEXT_STREAM,
    TextConfig,
    layer_weights,
    text_experts,
    text_heads,
    text_styles,
    text_units,
)
from tessera.nn.decoder import TextDecoder
from tessera.nn.multimodal import Encoder, MultimodalModel
from tessera.nn.vit import VisionEncoder, VisionShape, blank_image
from tessera.ops.attention import AttentionBackend
from tessera.weights.map import GroupByHead, Reshape, Rule


class GridVisionConfig(Section):
    """Configure a vision encoder over patches of images of any size, with rotary positions over height and width."""

    in_channels: int = Field(3, gt=0, le=10**8)
    patch_size: int = Field(14, gt=0, le=10**8)
    spatial_merge_size: int = Field(2, gt=0, le=10**8)
    temporal_patch_size: int = Field(2, gt=0, le=10**8)
    rope_theta: float = Field(1e4, gt=0)

    @property
    def patch_values(self) -> int:
        """Return the number of values in one flattened patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    def check_heads(self, name: str, heads: int) -> None:
        """Raise an error if the width in field `name` does not fit the number of heads."""
        if getattr(self, name) % (4 * heads):
            raise ValueError(
                f"{name} {getattr(self, name)} over {heads} heads must give a multiple of 4: half of each head is "
                "rotated by the height, half by the width"
            )

    @classmethod
    def read(cls, vision: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields in the `vision_config` of a folder."""
        fields = {name: vision[name] for name in cls.model_fields if name in vision and name != "rope_theta"}
        if "in_channels" not in vision and "in_chans" in vision:  # the hub's name
            fields["in_channels"] = vision["in_chans"]
        theta = (vision.get("rope_parameters") or {}).get("rope_theta", vision.get("rope_theta"))
        return fields if theta is None else {**fields, "rope_theta": theta}

    def write(self, model_type: str, **more: Any) -> dict[str, Any]:
        """Return the `vision_config` of a folder."""
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
    attention: AttentionBackend = Field("auto", description="implementation of attention")

    @model_validator(mode="after")
    def _tokens_exist(self) -> VisionLanguageConfig:
        for name in self.token_fields:
            if getattr(self, name) >= self.text.vocab_size:
                raise ValueError(f"{name} {getattr(self, name)} is outside the vocabulary of {self.text.vocab_size}")
        return self

    @classmethod
    def text_of(cls, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return the text fields of a config.json: at the top level, as on the hub, or in `text_config`."""
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
    """Hold the special tokens of the Qwen-VL models."""

    image_token_id: int = Field(151655, ge=0)
    video_token_id: int = Field(151656, ge=0)
    vision_start_token_id: int = Field(151652, ge=0)
    vision_end_token_id: int = Field(151653, ge=0)

    @property
    def special_token_ids(self) -> dict[str, int]:
        return {
            "<|image_pad|>": self.image_token_id,
            "<|video_pad|>": self.video_token_id,
            "<|vision_start|>": self.vision_start_token_id,
            "<|vision_end|>": self.vision_end_token_id,
        }


VISION = "vision"
VISION_BLOCKS = "vision.blocks.{*}"
WEIGHT_AND_BIAS = "{weight,bias}"


def vision_stream(shape: VisionShape, per_slot: int = 1) -> Stream:
    """Describe the patches of a batch. `per_slot`: patches that make one token, at most."""
    return Stream(
        tensors=("pixels", "patch_positions", "patch_index", "patch_weights"),
        segments=VISION,
        windows=f"{VISION}.windows",
        module=VISION,
        projector="projector",
        slots="media_slots",
        per_slot=per_slot,
        width=shape.width,
        blank=partial(blank_image, shape),
    )


def vision_language_model(
    vision: VisionEncoder, projector: nn.Module, text: TextDecoder, head: nn.Module, initializer_range: float
) -> MultimodalModel:
    """Return a model of a text decoder and one vision encoder."""
    shape = vision.shape
    encoder = Encoder(
        vision_stream(shape),
        width=text.shape.hidden * (1 + len(shape.deepstack_blocks)),
        initial={} if shape.layer_scale is None else {"_scale.weight": shape.layer_scale},
    )
    modules = {VISION: vision, "projector": projector}
    return MultimodalModel([encoder], modules, text, head, initializer_range)


def vision_language_plan(
    text: TextConfig,
    costs: VisionCosts,
    styles: Mapping[str, TensorStyle],
    *,
    tied: bool,
    per_token: int | None,
    patches: int | None = None,
) -> ModelPlan:
    """Return the plan of a vision encoder, a projector and a text decoder.

    `styles`: tensor-parallel styles of the projector; they also override those of the other parts. `per_token`: largest
    number of patches per visual token, for activations between pipeline stages; None: the vision encoder is not split.
    `patches`: usual number of patches per visual token, for costs; default: merge^2.
    """
    shape = costs.shape
    used = VISION_BLOCKS if shape.num_blocks_used is None else f"vision.blocks.{{0-{shape.num_blocks_used - 1}}}"
    output = None if per_token is None else StageActivation(per_token, shape.width)
    return ModelPlan(
        blocks=(used, BLOCKS),
        tensor={**text_styles(text, tied), **vision_styles(shape), **styles},
        units=_units(text, costs, used, output, shape.merge**2 if patches is None else patches),
        streams={VISION: vision_stream(shape, per_token or 1), "text": TEXT_STREAM},
        experts=text_experts(text),
        fsdp_root=("text.embed", "head"),  # the loss multiplies by the head, and a tied head reads the embedding
        attention=(f"{used}.attn.core", ATTENTION),
        heads={f"{VISION_BLOCKS}.attn.qkv": shape.heads, **text_heads(text)},
        tied={"head": "text.embed"} if tied else {},
    )


def vision_styles(shape: VisionShape) -> dict[str, TensorStyle]:
    """Return the tensor-parallel style of every parameter of a vision encoder."""
    norm = "weight" if shape.norm == "rms" else WEIGHT_AND_BIAS
    up = "{gate,up}" if shape.gated else "up"
    # A norm over all heads needs whole queries and keys: then attention is replicated on every rank.
    styles: dict[str, TensorStyle] = {
        f"vision.patch_embed.{_kinds(shape.patch_bias)}": "replicate",
        f"vision.blocks.{{*}}.{{attn_norm,mlp_norm}}.{norm}": "replicate",
        f"vision.blocks.{{*}}.attn.qkv.{_kinds(shape.qkv_bias)}": "replicate" if shape.qk_norm else "column",
        "vision.blocks.{*}.attn.proj.weight": "replicate" if shape.qk_norm else "row",
        f"vision.blocks.{{*}}.mlp.{up}.{_kinds(shape.mlp_bias)}": "column",
        "vision.blocks.{*}.mlp.down.weight": "row",
    }
    replicated = {
        "blocks.{*}.attn.proj.bias": shape.proj_bias,
        "blocks.{*}.mlp.down.bias": shape.mlp_bias,
        "blocks.{*}.attn.{q_norm,k_norm}.weight": shape.qk_norm,
        "blocks.{*}.{attn_scale,mlp_scale}.weight": shape.layer_scale is not None,
        "table.weight": shape.positions > 0,
        "table.class_token": shape.class_token,
        f"norm_patches.{norm}": shape.norm_patches,
        f"norm_before.{norm}": shape.norm_before,
        f"norm_after.{norm}": shape.norm_after,
    }
    return {**styles, **{f"vision.{name}": "replicate" for name, present in replicated.items() if present}}


def merger_styles(path: str = "projector", norm: str = WEIGHT_AND_BIAS) -> dict[str, TensorStyle]:
    """Return the tensor-parallel styles of a `PatchMerger`. `norm`: parameters of its norm."""
    return {
        f"{path}.norm.{norm}": "replicate",
        f"{path}.up.{WEIGHT_AND_BIAS}": "column",
        f"{path}.down.weight": "row",
        f"{path}.down.bias": "replicate",
    }


def _kinds(bias: bool) -> str:
    return WEIGHT_AND_BIAS if bias else "weight"


def _units(
    text: TextConfig, costs: VisionCosts, used: str, output: StageActivation | None, patches: int
) -> tuple[PipelineUnit, ...]:
    """Return the pipeline units. Costs are weights per visual token, relative to those of one text layer."""
    shape, layer = costs.shape, layer_weights(text)
    first = {"norm_patches": shape.norm_patches, "table": shape.positions > 0, "norm_before": shape.norm_before}
    last = [f"blocks.{number}" for number in range(shape.blocks_used, shape.layers)]
    last += ["norm_after"] if shape.norm_after else []
    return (
        PipelineUnit("vision.patch_embed", patches * shape.patch_values * shape.hidden / layer),
        *(PipelineUnit(f"vision.{name}", 0.0) for name, present in first.items() if present),
        PipelineUnit(used, patches * shape.block_weights / layer, VISION, output),
        *(PipelineUnit(f"vision.{name}", 0.0) for name in last),
        PipelineUnit("projector", patches / shape.merge**2 * costs.projector_weights / layer),
        *text_units(text, whole=len(shape.deepstack_blocks)),
    )


def grid_tower_rules(
    vision: GridVisionConfig, width: int, heads: int, prefix: str, pairs: Iterable[tuple[str, str]]
) -> list[Rule]:
    """Return the weight rules of a vision encoder.

    `pairs`: native names, and foreign names without `prefix`, of tensors that are stored as they are. Folders store the
    patch embedding as a convolution, and the rows of `qkv` grouped by query, key and value.
    """
    patch = (vision.in_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    as_convolution = Reshape((width, vision.patch_values), (width, *patch))
    return [
        Rule("vision.patch_embed.weight", prefix + "patch_embed.proj.weight", as_convolution),
        Rule("vision.blocks.{i}.attn.qkv.{kind}", prefix + "blocks.{i}.attn.qkv.{kind}", GroupByHead(heads)),
        *(Rule(native, prefix + foreign) for native, foreign in pairs),
    ]
