"""Plan, parameter names, costs and example batches of families with text and latents in one sequence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from math import ceil, sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tessera.core.batch import Batch, Segments
from tessera.core.model_plan import ModelPlan, Stream
from tessera.core.spec import FULL, Training
from tessera.diffusion.config import DiffusersConfig
from tessera.diffusion.family import GenerationSpec
from tessera.diffusion.plan import generation_plan
from tessera.diffusion.spec import generation_family
from tessera.models.text.costs import Measures
from tessera.nn.joint_transformer import TIME_FEATURES, JointTransformer, TransformerShape
from tessera.weights.map import Rule, WeightMap, fused_rules
from tessera.weights.operations import ColumnsByHead, SwappedHalves

# The task computes latents and text of full samples; the index tensors select the tokens of this rank.
JOINT_STREAM = Stream(
    tensors=("sample_index", "positions"),
    segments="latents",
    dim=-1,
    positions=("text_index", "latent_index"),
    index="token_index",
)
EXAMPLE_TEXT = 512
PATCH = 2  # rows and columns of latents in a token, for models whose input is already patchified


class JointConfig(DiffusersConfig, ABC):
    """Base class of configurations of families with text and latents in one sequence."""

    @property
    @abstractmethod
    def shape(self) -> TransformerShape:
        """Return the sizes and options of the transformer."""

    @staticmethod
    def check_rope(axes: Sequence[int], head_dim: int) -> None:
        """Raise if the sizes of the position axes are odd or do not add up to the size of a head."""
        if sum(axes) != head_dim or any(size < 0 or size % 2 for size in axes):
            raise ValueError(f"axes_dims_rope {list(axes)} must be even and add up to attention_head_dim {head_dim}")


def joint_family(
    name: str,
    config: type[JointConfig],
    presets: Mapping[str, Mapping[str, Any]],
    weights: Callable[[Any], WeightMap],
    original: Callable[[Any], WeightMap] | None = None,
    **parts: Any,
) -> GenerationSpec:
    """Return the specification of a family. `weights`, `original`: parameter names and shapes in diffusers folders and
    in original checkpoints. `parts`: arguments of `generation_family` that differ from those of a plain
    `JointTransformer`."""
    plain = {"build": _build, "plan": _plan, "work": _work, "measures": batch_measures, "example": joint_example}
    return generation_family(name, config, presets, weights=weights, original=original, **{**plain, **parts})


def _build(config: JointConfig) -> JointTransformer:
    return JointTransformer(config.shape)


def _plan(config: JointConfig) -> ModelPlan:
    return joint_plan(config.shape)


def _work(config: JointConfig, measures: Measures, training: Training) -> np.ndarray:
    return joint_work(config.shape, measures, training)


# ---------------------------------------------------------------------------------------------- plan


def joint_plan(shape: TransformerShape, stream: Stream = JOINT_STREAM, **more: Any) -> ModelPlan:
    """Return the parallel plan of the transformer. `more`: further arguments of `generation_plan`."""
    hidden, layer = shape.block.hidden, 2 * _layer_weights(shape)  # weights of a double block
    units = {"embed": (shape.latent_values + shape.text_width) * hidden / layer}
    units |= {"blocks.{*}": 1.0} if shape.double else {}
    units |= {"single_blocks.{*}": _layer_weights(shape) / layer} if shape.single else {}
    units["head"] = shape.out_values * hidden / layer
    cores = {"blocks.{*}.attn": shape.double, "blocks.{*}.attn2": shape.dual_blocks, "single_blocks.{*}": shape.single}
    attention = [f"{path}.core" for path, present in cores.items() if present]
    return generation_plan(stream, hidden, shape.block.heads, units, attention=attention, **more)


# ---------------------------------------------------------------------------------------------- parameter names

# (parameter name in Tessera, parameter name in diffusers folders), for weights with the same shape in both.
DOUBLE_ATTENTION = (
    ("attn.latent.{h}.{kind}", "attn.to_{h}.{kind}"),
    ("attn.text.{h}.{kind}", "attn.add_{h}_proj.{kind}"),
    ("attn.latent_norm.{h}.weight", "attn.norm_{h}.weight"),
    ("attn.text_norm.{h}.weight", "attn.norm_added_{h}.weight"),
    ("attn.latent_out.{kind}", "attn.to_out.0.{kind}"),
    ("attn.text_out.{kind}", "attn.to_add_out.{kind}"),
)
DOUBLE_REST = (
    ("latent_modulation.{kind}", "norm1.linear.{kind}"),
    ("text_modulation.{kind}", "norm1_context.linear.{kind}"),
    ("latent_mlp.up.{kind}", "ff.net.0.proj.{kind}"),
    ("latent_mlp.down.{kind}", "ff.net.2.{kind}"),
    ("text_mlp.up.{kind}", "ff_context.net.0.proj.{kind}"),
    ("text_mlp.down.{kind}", "ff_context.net.2.{kind}"),
)
SINGLE = (
    ("modulation.{kind}", "norm.linear.{kind}"),
    ("proj.up.{kind}", "proj_mlp.{kind}"),
    ("proj.{h}.{kind}", "attn.to_{h}.{kind}"),
    ("norm.{h}.weight", "attn.norm_{h}.weight"),
    ("out.bias", "proj_out.bias"),
)
CONDITIONS = (
    ("embed.time.up.{kind}", "time_text_embed.timestep_embedder.linear_1.{kind}"),
    ("embed.time.down.{kind}", "time_text_embed.timestep_embedder.linear_2.{kind}"),
    ("embed.guidance.up.{kind}", "time_text_embed.guidance_embedder.linear_1.{kind}"),
    ("embed.guidance.down.{kind}", "time_text_embed.guidance_embedder.linear_2.{kind}"),
    ("embed.pooled.up.{kind}", "time_text_embed.text_embedder.linear_1.{kind}"),
    ("embed.pooled.down.{kind}", "time_text_embed.text_embedder.linear_2.{kind}"),
    ("head.modulation.{kind}", "norm_out.linear.{kind}"),
)


def double_rules(pairs: tuple[tuple[str, str], ...] = DOUBLE_ATTENTION + DOUBLE_REST) -> list[Rule]:
    return [Rule("blocks.{i}." + native, "transformer_blocks.{i}." + foreign) for native, foreign in pairs]


def single_rules(shape: TransformerShape) -> list[Rule]:
    block = shape.block
    joined = ColumnsByHead(block.heads, (block.hidden, block.intermediate))
    pairs = [Rule("single_blocks.{i}." + n, "single_transformer_blocks.{i}." + f) for n, f in SINGLE]
    return [*pairs, Rule("single_blocks.{i}.out.weight", "single_transformer_blocks.{i}.proj_out.weight", joined)]


def original_rules(shape: TransformerShape, qkv: str) -> list[Rule]:
    """Return the rules of matrices that original checkpoints store joined. `qkv`: end of the name of a double block's
    queries, keys and values."""
    block = shape.block
    rows = (block.hidden,) * 3 + (block.intermediate,)
    joined = ColumnsByHead(block.heads, (block.hidden, block.intermediate))
    return [
        Rule("head.modulation.{kind}", "final_layer.adaLN_modulation.1.{kind}", SwappedHalves()),
        *fused_rules("blocks.{i}.attn.latent", "qkv", f"double_blocks.{{i}}.img_{qkv}"),
        *fused_rules("blocks.{i}.attn.text", "qkv", f"double_blocks.{{i}}.txt_{qkv}"),
        *fused_rules("single_blocks.{i}.proj", ("q", "k", "v", "up"), "single_blocks.{i}.linear1", rows),
        Rule("single_blocks.{i}.out.weight", "single_blocks.{i}.linear2.weight", joined),
    ]


def idle_layers(shape: TransformerShape) -> tuple[str, ...]:
    """Return the names of layers whose output is not used: text layers after the last attention."""
    idle = [number for number in range(shape.double) if shape.rest(number) == "kept"]
    return tuple(f"blocks.{n}.{name}" for n in idle for name in ("attn.text_out", "text_mlp.up", "text_mlp.down"))


def plain_rules(pairs: tuple[tuple[str, str], ...]) -> list[Rule]:
    return [Rule(native, foreign) for native, foreign in pairs]


# ---------------------------------------------------------------------------------------------- costs


def joint_work(shape: TransformerShape, measures: Measures, training: Training) -> np.ndarray:
    """Return the FLOPs of one forward and backward pass for each sample."""
    double, single, first, last = (training.get(part, FULL) for part in ("blocks", "single_blocks", "embed", "head"))
    tokens, text, samples = (measures[name].astype(np.float64) for name in ("tokens", "text", "samples"))
    latents, size = tokens - text, shape.block.hidden
    conditions = samples * (2 if shape.reference_time else 1)
    attention = 4 * size * tokens**2
    layer, closing = _layer_weights(shape), sum(shape.rest(number) != "computed" for number in range(shape.double))
    doubles = shape.double * (tokens * layer + conditions * 12 * size**2)
    doubles = doubles - closing * text * (layer - 3 * size**2)
    if shape.last_rest == "absent":
        doubles = doubles - closing * conditions * 4 * size**2
    duals = len(shape.dual_blocks)
    doubles = doubles + duals * (latents * 4 + conditions * 3) * size**2
    times = TIME_FEATURES * (1 + shape.guidance) + shape.pooled_width
    squares = 1 + shape.guidance + bool(shape.pooled_width)
    return (
        double.weights * 2 * doubles
        + double.attention * (shape.double * attention + duals * 4 * size * latents**2)
        + single.weights * 2 * shape.single * (tokens * layer + conditions * 3 * size**2)
        + single.attention * shape.single * attention
        # Inputs (latents, text, times) need no gradient, which saves one matrix product in the backward pass.
        + first.first * 2 * size * (latents * shape.latent_values + text * shape.text_width + conditions * times)
        + first.weights * 2 * conditions * squares * size**2
        + last.weights * 2 * size * (latents * shape.out_values + conditions * 2 * size)
    )


def batch_measures(batch: Batch, conditions: Sequence[str] = ("text",)) -> dict[str, np.ndarray]:
    """Return the numbers of tokens of each sample of a batch. `conditions`: names of the other segments in the main
    sequence, such as text."""
    lengths = np.array(batch.segments["latents"].lengths)
    text = sum(np.array(batch.segments[name].lengths) for name in conditions if name in batch.segments)
    return {"tokens": lengths, "text": np.asarray(text), "samples": np.ones_like(lengths)}


def _layer_weights(shape: TransformerShape) -> int:
    """Return the number of weights in one block that multiply each token."""
    return shape.block.hidden * (4 * shape.block.hidden + 2 * shape.block.intermediate)


def joint_example(config: JointConfig, tokens: int) -> Batch:
    """Return a batch of one sample of zeros with `tokens` tokens. At most a quarter of them is text."""
    shape = config.shape
    text = min(EXAMPLE_TEXT, tokens // 4)
    latents = tokens - text
    side = min(shape.table, ceil(sqrt(latents))) or ceil(sqrt(latents))
    places = torch.arange(latents)
    rows, columns = places // side, places % side
    if shape.table:
        rows = rows % shape.table
    at = torch.stack([torch.zeros_like(places), rows, columns])
    tensors: dict[str, Tensor] = {
        "sample_index": torch.zeros(tokens, dtype=torch.int64),
        "positions": torch.cat([torch.zeros(3, text, dtype=torch.int64), at], dim=1),
        "text_index": torch.arange(text),
        "latent_index": torch.arange(text, tokens),
        "latents": torch.zeros(latents, shape.latent_values),
        "text": torch.zeros(text, shape.text_width),
        "timesteps": torch.zeros(1),
    }
    if shape.pooled_width:
        tensors["pooled"] = torch.zeros(1, shape.pooled_width)
    if shape.guidance:
        tensors["guidance"] = torch.zeros(1)
    segments = {"latents": Segments.of([tokens]), "text": Segments.of([text])}
    return Batch(tensors, segments, {"latents": ((1, 1, latents),)}, sample_ids=("example",), seeds=(0,))
