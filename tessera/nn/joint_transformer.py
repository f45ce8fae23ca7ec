"""A transformer over text and latents together: embeddings, conditions, double and single blocks, the prediction."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.core.batch import Batch
from tessera.core.outputs import LATENTS, Outputs
from tessera.nn.dit import FeedForward, TimeEmbedding, modulated_norm, spread
from tessera.nn.joint_attention import (
    DoubleBlock,
    JointLayout,
    JointShape,
    SingleBlock,
    TextRest,
    joint_layout,
    segments_by_kind,
)
from tessera.nn.layers import RMSNorm
from tessera.nn.stage_carry import pack_carry, unpack_carry
from tessera.nn.vit import PatchEmbed
from tessera.ops.pointwise import axes_angles

TIME_FEATURES = 256
THETA = 10_000.0
GUIDANCE_UNIT = 1000.0  # guidance scales are multiplied by this and embedded like timesteps
INITIAL_RANGE = 0.02


@dataclass(frozen=True)
class TransformerShape:
    """Hold the sizes and options of a transformer over text and latents."""

    block: JointShape
    double: int  # number of double blocks
    single: int  # number of single blocks
    latent_values: int  # input channels of a token: values of one latent patch
    out_values: int  # output channels of a token: values of one predicted patch
    text_width: int
    pooled_width: int = 0  # width of the pooled text embedding; 0: unused
    guidance: bool = False  # whether the model reads a guidance scale
    text_norm: bool = False  # RMS norm of text embeddings
    rope_axes: tuple[int, ...] = ()  # dimensions of a head that each position axis rotates; empty: no rotation
    table: int = 0  # rows and columns in the table of fixed position embeddings; 0: no table
    table_base: int = 0  # positions of the table's rows and columns are from 0 to below this number
    dual_blocks: tuple[int, ...] = ()  # double blocks with additional attention among latents
    last_rest: TextRest = "kept"  # what the last double block does with text if no single block follows
    reference_time: bool = False  # whether latents of reference images have timestep 0

    def rest(self, block: int) -> TextRest:
        """Return what a double block does with text after attention."""
        return self.last_rest if block == self.double - 1 and not self.single else "computed"


class PositionTable(nn.Module):
    """Add fixed embeddings of rows and columns to latents. They are a frozen parameter, because diffusers
    folders store them."""

    def __init__(self, side: int, hidden: int) -> None:
        super().__init__()
        self.side = side
        self.weight = nn.Parameter(torch.empty(side * side, hidden), requires_grad=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return (x + self.weight.index_select(0, positions[1] * self.side + positions[2])).to(x.dtype)


class Embeddings(nn.Module):
    """Embed latents, text, and the conditions of a sample: timestep, guidance scale, pooled text."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        hidden = shape.block.hidden
        self.reference_time = shape.reference_time
        self.latents = PatchEmbed(shape.latent_values, hidden, bias=True)
        self.table = PositionTable(shape.table, hidden) if shape.table else None
        self.text_norm = RMSNorm(shape.text_width, shape.block.eps) if shape.text_norm else None
        self.text = nn.Linear(shape.text_width, hidden)
        self.time = TimeEmbedding(TIME_FEATURES, hidden)
        self.guidance = TimeEmbedding(TIME_FEATURES, hidden) if shape.guidance else None
        self.pooled = FeedForward(shape.pooled_width, hidden, hidden, F.silu) if shape.pooled_width else None

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return latents, text, and the conditions of samples, which are inputs of the modulation layers."""
        latents: Tensor = self.latents(batch["latents"])
        text = batch["text"].to(latents.dtype)
        text = self.text(text if self.text_norm is None else self.text_norm(text))
        if self.table is not None:
            latents = self.table(latents, batch["positions"][:, batch["latent_index"]])
        return latents, text, F.silu(self._condition(batch, latents.dtype))

    def _condition(self, batch: Batch, dtype: torch.dtype) -> Tensor:
        times = batch["timesteps"]
        if self.reference_time:  # a second condition per sample, for timestep 0: that of the reference images
            times = torch.cat([times, torch.zeros_like(times)])
        condition: Tensor = self.time(times).to(dtype)
        if self.guidance is not None:
            condition = condition + self.guidance(batch["guidance"] * GUIDANCE_UNIT)
        if self.pooled is not None:
            condition = condition + self.pooled(batch["pooled"].to(dtype))
        return condition


class Head(nn.Module):
    """Predict patches from latents, which are normalised, scaled and shifted by the sample's condition."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        hidden, self.eps = shape.block.hidden, shape.block.eps
        self.modulation = nn.Linear(hidden, 2 * hidden)
        self.proj = nn.Linear(hidden, shape.out_values)

    def forward(self, x: Tensor, condition: Tensor, samples: Tensor) -> Tensor:
        scale, shift = spread(self.modulation(condition), samples).chunk(2, dim=-1)
        return self.proj(modulated_norm(x, shift, scale, self.eps))


class JointTransformer(nn.Module):
    """Predict latents from noisy latents and text, which form one sequence.

    Batch: `latents` [N, values], `text` [L, width], `latent_index` [N] and `text_index` [L] (indices in the main
    sequence of N + L tokens), `positions` [3, N + L], `sample_index` [N + L], `timesteps` [S] from 0 to 1000,
    segments "latents" of the main sequence; depending on options `pooled` [S, width], `guidance` [S], and segments
    "text", where the text of a sample precedes its latents.

    Modules that are None belong to another pipeline stage. `carry` contains the activation of the previous stage: the
    main sequence, then the conditions of samples, which only the first stage computes.
    """

    def __init__(self, shape: TransformerShape, embed: nn.Module | None = None) -> None:
        """Build the model. `embed`: a module in place of `Embeddings`, with the same outputs."""
        super().__init__()
        self.shape = shape
        self.embed: nn.Module | None = Embeddings(shape) if embed is None else embed
        self.blocks = nn.ModuleList(
            DoubleBlock(shape.block, shape.rest(number), number in shape.dual_blocks) for number in range(shape.double)
        )
        self.single_blocks = nn.ModuleList(SingleBlock(shape.block) for _ in range(shape.single))
        self.head: Head | None = Head(shape)

    def forward(self, batch: Batch, carry: Tensor | None = None) -> Outputs | Tensor:
        layout = self._layout(batch)
        if self.embed is not None:
            latents, text, condition = self.embed(batch)
        else:
            conditions = (2 if self.shape.reference_time else 1) * batch["timesteps"].shape[0]
            joined, condition = unpack_carry(carry, batch["sample_index"].shape[0], conditions)
            text, latents = layout.split(joined)
        by_time = self._by_time(layout, batch)
        for block in self.blocks:
            if block is not None:
                latents, text = block(latents, text, condition, by_time)
        if any(block is not None for block in self.single_blocks):
            joined = layout.join(text, latents)
            for block in self.single_blocks:
                if block is not None:
                    joined = block(joined, condition, layout)
            text, latents = layout.split(joined)
        if self.head is None:
            return pack_carry(layout.join(text, latents), condition)
        return {LATENTS: self.head(latents, condition, layout.latent_samples)}

    def _layout(self, batch: Batch) -> JointLayout:
        axes = self.shape.rope_axes
        layout = joint_layout(batch, axes_angles(batch["positions"], axes, THETA) if axes else None)
        if not self.shape.dual_blocks:
            return layout
        return replace(layout, kinds=segments_by_kind(batch.segments["latents"], batch.segments["text"]))

    def _by_time(self, layout: JointLayout, batch: Batch) -> JointLayout:
        """Return the layout in which latents of reference images use the second condition of their sample."""
        if not self.shape.reference_time:
            return layout
        reference = batch["positions"][0, batch["latent_index"]] > 0
        return replace(layout, latent_samples=layout.latent_samples + len(batch["timesteps"]) * reference)

    @torch.no_grad()
    def initialize(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Fill the unsharded tensor of parameter `name` with initial weights. Modulations and prediction start at 0."""
        *path, kind = name.split(".")
        if name == "embed.table.weight":
            tensor.copy_(self._position_table())
        elif kind == "bias" or path[-1].endswith("modulation") or path == ["head", "proj"]:
            tensor.zero_()
        elif path[-1].endswith("norm") or path[-2].endswith("norm"):
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, INITIAL_RANGE, generator=generator)

    def _position_table(self) -> Tensor:
        """Return the table [table * table, hidden]: sines and cosines of the column, then of the row."""
        side, width = self.shape.table, self.shape.block.hidden // 4
        at = torch.arange(side, dtype=torch.float32) / (side / self.shape.table_base)
        angles = at.double().unsqueeze(-1) / THETA ** (torch.arange(width, dtype=torch.float64) / width)
        axis = torch.cat([angles.sin(), angles.cos()], dim=-1)
        columns, rows = axis.expand(side, -1, -1), axis.unsqueeze(1).expand(-1, side, -1)
        return torch.cat([columns, rows], dim=-1).flatten(0, 1).float()
