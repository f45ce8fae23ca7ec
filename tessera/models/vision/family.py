"""Declare vision-language families: a family states its differences; model, plan, FLOPs and weight map follow."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from math import isqrt
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from tessera.core.batch import Batch, Segments
from tessera.core.model_plan import PipelineUnit, StageActivation, TensorStyle
from tessera.models.media_family import MediaFamily, Tower
from tessera.models.text.decoder import TextConfig, language_weights, layer_weights
from tessera.models.vision.config import GridVisionConfig
from tessera.models.vision.costs import EXAMPLE_IMAGES, VisionCosts, example_with_media
from tessera.models.vision.patches import PositionTable, block_positions
from tessera.models.vision.processor import PATCHES, VISION, VISION_STREAMS
from tessera.nn.multimodal import Encoder
from tessera.nn.vit import VisionEncoder, VisionShape, blank_image
from tessera.weights.map import Rule, WeightMap
from tessera.weights.operations import GroupByHead, Reshape

VISION_BLOCKS = "vision.blocks.{*}"
WEIGHT_AND_BIAS = "{weight,bias}"


class VisionFamily(MediaFamily):
    """Declare a family with a vision encoder, a projector and a text decoder. Its configuration has the field
    `vision`."""

    # ------------------------------------------------------------------------------------------ what a family states

    @abstractmethod
    def shape(self, config: Any) -> VisionShape: ...

    @abstractmethod
    def projector(self, config: Any, shape: VisionShape) -> nn.Module: ...

    def tokens_of_patches(self, config: Any) -> tuple[int, int]:
        """Return the number of patches (class token included) and of tokens of a merged block, tile or image."""
        return config.vision.spatial_merge_size**2, 1

    def most_patches(self, config: Any) -> int | None:
        """Return the largest number of patches per token. It determines the size of activations between stages.

        None: the vision encoder stays in one stage.
        """
        return int(config.vision.spatial_merge_size**2)

    def usual_patches(self, config: Any) -> int:
        """Return the usual number of patches per token, for the costs of pipeline stages."""
        return int(config.vision.spatial_merge_size**2)

    # ------------------------------------------------------------------------------------------ what follows

    def costs(self, config: Any) -> VisionCosts:
        """Return the sizes that determine the FLOPs of encoder and projector."""
        parameters = _projector_parameters(self, config).values()
        linear = sum(parameter.numel() for parameter in parameters if parameter.dim() == 2)
        return VisionCosts(self.shape(config), linear, *self.tokens_of_patches(config))

    def towers(self, config: Any) -> dict[str, Tower]:
        costs, most = self.costs(config), self.most_patches(config)
        shape = costs.shape
        blank = functools.partial(blank_image, shape)
        stream = replace(PATCHES, per_slot=most or 1, width=shape.width, blank=blank)
        encoder = Encoder(
            stream,
            width=config.text.hidden_size * (1 + len(shape.deepstack_blocks)),
            initial={} if shape.layer_scale is None else {"_scale.weight": shape.layer_scale},
        )
        used = VISION_BLOCKS if shape.num_blocks_used is None else f"vision.blocks.{{0-{shape.num_blocks_used - 1}}}"
        output = None if most is None else StageActivation(most, shape.width)
        projector = {f"projector.{name}": _projector_style(name) for name in _projector_parameters(self, config)}
        vision = Tower(
            media=replace(VISION_STREAMS[VISION], stream=stream),
            encoder=encoder,
            build=lambda: {VISION: VisionEncoder(shape), "projector": self.projector(config, shape)},
            blocks=used,
            heads={f"{VISION_BLOCKS}.attn.qkv": shape.heads},
            styles={**vision_styles(shape), **projector},
            units=_units(config.text, costs, used, output, self.usual_patches(config)),
            work=costs.work,
            text_layers=len(shape.deepstack_blocks),
        )
        return {VISION: vision, **super().towers(config)}


class GridFamily(VisionFamily):
    """Declare a family that cuts images of any size into a grid of patches."""

    pairs: ClassVar[tuple[tuple[str, str], ...]]  # Tessera's names -> names in folders, without the prefix `tower`
    tower: ClassVar[str]  # prefix of the names of the vision encoder's tensors in folders
    text_prefix: ClassVar[str] = "model."
    renames: ClassVar[tuple[tuple[str, str], ...]]  # (alternative prefix in folders, usual prefix)
    # buffers of the vision encoder that folders may contain, and that are not read
    ignored: ClassVar[tuple[str, ...]] = ("rotary_pos_emb.inv_freq",)
    unread: ClassVar[tuple[str, ...]] = ()  # names, or prefixes of names, of tensors in folders that are not read
    stacked: ClassVar[bool] = False  # folders have one tensor for all experts of a layer

    def rules(self, config: Any) -> list[Rule]:
        """Return weight rules for tensors whose layout in folders differs from that in the model."""
        return []

    def weights(self, config: Any) -> WeightMap:
        return language_weights(
            config.text,
            config.tie_word_embeddings,
            [*self.rules(config), *_tower_rules(config.vision, self.tower, self.pairs)],
            prefix=self.text_prefix,
            stacked=self.stacked,
            renames=self.renames,
            ignored=(*(self.tower + name for name in self.ignored), *self.unread),
        )

    def shape(self, config: Any) -> VisionShape:
        vision = config.vision
        return VisionShape(
            patch_values=vision.patch_values,
            hidden=vision.width,
            layers=vision.depth,
            heads=vision.num_heads,
            merge=vision.spatial_merge_size,
            activation=vision.hidden_act,
            rope_theta=vision.rope_theta,
            attention=config.attention,
            **self.encoder(config),
        )

    @abstractmethod
    def encoder(self, config: Any) -> dict[str, Any]:
        """Return the fields of `VisionShape` that the family sets. `intermediate` is required."""
        ...

    @property
    def position_table(self) -> PositionTable | None:
        """Return the interpolation of learned position embeddings; None: the encoder has none."""
        return None

    def window_sizes(self, config: Any, side: int) -> list[int]:
        """Return the number of tokens of each attention window of a square image; empty without window attention."""
        return []

    def example(self, config: Any, tokens: int) -> Batch:
        """Return a batch in which square images of one size make up about a quarter of the tokens."""
        vision, merge = config.vision, config.vision.spatial_merge_size
        side = max(1, isqrt(tokens // (4 * EXAMPLE_IMAGES)))  # tokens along each side of an image
        images = max(1, min(EXAMPLE_IMAGES, tokens // (4 * side * side)))
        patches = side * merge
        positions = block_positions(patches, patches, merge)
        pixels = torch.zeros(images * patches**2, vision.patch_values)

        def for_all_images(values: np.ndarray) -> Tensor:
            # `pixels` may be on the meta device, for memory estimates.
            return torch.as_tensor(values, device=pixels.device).repeat(images, 1)

        media = {
            "pixels": pixels,
            "patch_positions": for_all_images(positions),
            "media_slots": torch.arange(images * side * side),
        }
        if self.position_table is not None:
            entries = self.position_table(positions, patches, patches, vision.table_side)
            media["patch_index"], media["patch_weights"] = map(for_all_images, entries)
        batch = example_with_media(tokens, media, [patches**2] * images, axes=3)
        windows = [merge**2 * size for size in self.window_sizes(config, side)] * images
        if not windows:
            return batch
        return replace(batch, segments={**batch.segments, PATCHES.windows: Segments.of(windows)})


@functools.lru_cache(maxsize=8)
def _projector_parameters(family: VisionFamily, config: Any) -> dict[str, nn.Parameter]:
    """Return the projector's parameters on the meta device. Cached, because costs are computed for every batch."""
    with torch.device("meta"):
        return dict(family.projector(config, family.shape(config)).named_parameters())


def _projector_style(name: str) -> TensorStyle:
    """Return the tensor-parallel style of a projector's parameter: column-parallel, then row-parallel layers."""
    layer, kind = name.split(".")[-2:] if "." in name else ("", "")
    if layer in ("up", "gate", "downsample"):
        return "column"
    return "row" if layer in ("down", "proj") and kind == "weight" else "replicate"


def vision_styles(shape: VisionShape) -> dict[str, TensorStyle]:
    """Return the tensor-parallel style of every parameter of a vision encoder."""
    norm = "weight" if shape.norm == "rms" else WEIGHT_AND_BIAS
    up = "{gate,up}" if shape.gated else "up"
    # With a norm over all heads a rank needs all queries and keys, so attention is replicated.
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


def _kinds(bias: bool) -> str:
    return WEIGHT_AND_BIAS if bias else "weight"


def _units(
    text: TextConfig, costs: VisionCosts, used: str, output: StageActivation | None, patches: int
) -> tuple[PipelineUnit, ...]:
    """Return the pipeline units of the encoder: the modules that can be put on different stages, in order.

    The cost of a unit is the number of multiplications per visual token, divided by that of a text layer.
    """
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
    )


def _tower_rules(vision: GridVisionConfig, prefix: str, pairs: Iterable[tuple[str, str]]) -> list[Rule]:
    """Return the weight rules of a vision encoder.

    `pairs`: Tessera's names and names in folders (without `prefix`) of tensors with the same layout. Folders store the
    patch embedding as a convolution, and the rows of `qkv` grouped by query, key and value.
    """
    patch = (vision.in_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    as_convolution = Reshape((vision.width, vision.patch_values), (vision.width, *patch))
    return [
        Rule("vision.patch_embed.weight", prefix + "patch_embed.proj.weight", as_convolution),
        Rule("vision.blocks.{i}.attn.qkv.{kind}", prefix + "blocks.{i}.attn.qkv.{kind}", GroupByHead(vision.num_heads)),
        *(Rule(native, prefix + foreign) for native, foreign in pairs),
    ]
