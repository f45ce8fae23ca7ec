"""Transformers whose latents attend to each other and to the text: model, plan, costs and example batches.

Batches have `latents` [T, patch values], `positions` [3, T] (frame, row, column, in patches), `sample_index` [T],
`timesteps`, `text` [L, width] and, where the family reads them, `image_embeds` [M, width]; see `diffusion.batches`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.core.batch import Batch, Segments
from tessera.core.model_plan import ModelPlan, Stream
from tessera.core.outputs import LATENTS as PREDICTION
from tessera.core.outputs import Outputs
from tessera.core.spec import FULL, Training
from tessera.diffusion.config import DiffusersConfig
from tessera.diffusion.family import GenerationSpec
from tessera.diffusion.plan import generation_plan
from tessera.diffusion.spec import generation_family
from tessera.models.text.costs import Measures
from tessera.nn.dit import FeedForward, Modulation, TimeEmbedding, modulated_norm, time_index
from tessera.nn.stage_carry import pack_carry, unpack_carry
from tessera.nn.vit import PatchEmbed
from tessera.ops.pointwise import Angles

EXAMPLE_TEXT = 512
# The main sequence. The task computes the latents of full samples; `token_index` selects the tokens of this rank.
LATENTS = Stream(
    tensors=("sample_index", "positions", "time_index"),
    segments="latents",
    dim=-1,
    positions=("trained",),
    index="token_index",
    own_segments="latents.own",
)


@dataclass(frozen=True)
class CrossShape:
    """Hold the sizes of a transformer with cross attention, from which its costs are computed."""

    width: int  # heads x head size
    heads: int
    layers: int
    block: int  # number of weights in one block that multiply each token
    latent_values: int  # number of values in an input token
    out_values: int
    text_width: int
    time_features: int
    image_width: int = 0  # width of image embeddings; 0: the model reads none
    image_embeds: int = 0  # number of image embeddings per sample


class CrossConfig(DiffusersConfig):
    """Base class of configurations of families with cross attention."""

    @property
    def shape(self) -> CrossShape:
        """Return the sizes of the transformer."""
        raise NotImplementedError


def cross_family(
    name: str, config: type[CrossConfig], presets: Mapping[str, Mapping[str, Any]], **parts: Any
) -> GenerationSpec:
    """Return the specification of a family. `parts`: `build`, `plan`, `weights` and other arguments of
    `generation_family`."""
    return generation_family(name, config, presets, work=_work, measures=batch_measures, example=_example, **parts)


def cross_plan(shape: CrossShape, embed: float, **more: Any) -> ModelPlan:
    """Return the parallel plan. `embed`: number of weights in the embeddings. `more`: further arguments of
    `generation_plan`."""
    head = shape.out_values * shape.width / shape.block
    units = {"embed": embed / shape.block, "blocks.{*}": 1.0, "head": head}
    return generation_plan(LATENTS, shape.width, shape.heads, units, **more)


# ---------------------------------------------------------------------------------------------- model


@dataclass(frozen=True)
class CrossLayout:
    """Hold the inputs without gradient that all blocks share, such as rotary angles and segment bounds."""

    angles: Angles
    times: Tensor | None  # [T]: index of each token's entry in the modulation; see `time_index`
    segments: Segments  # bounds of samples in the full sequence
    local: Segments  # bounds of samples among the tokens of this rank
    text: Segments
    image: Segments | None


class CrossEmbeddings(nn.Module):
    """Compute the embeddings of tokens, text, images and time, which are inputs of the blocks."""

    def __init__(self, shape: CrossShape, image: nn.Module | None = None) -> None:
        """Create the layers. `image`: module that projects embeddings of conditioning images."""
        super().__init__()
        self.patch = PatchEmbed(shape.latent_values, shape.width, bias=True)
        self.time = TimeEmbedding(shape.time_features, shape.width)
        self.modulation = nn.Linear(shape.width, 6 * shape.width)
        self.text = FeedForward(shape.text_width, shape.width, shape.width)
        self.image = image

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Return embedded latents, text and images, and a tensor [S, 7, D].

        For each of S samples it contains the time embedding and the six modulation vectors of the blocks.
        """
        x: Tensor = self.patch(batch["latents"])
        time = self.time(batch["timesteps"]).to(x.dtype)
        modulation = self.modulation(F.silu(time)).view(time.shape[0], 6, -1)
        image = None if self.image is None else self.image(batch["image_embeds"].to(x.dtype))
        return x, self.text(batch["text"].to(x.dtype)), image, torch.cat([time.unsqueeze(1), modulation], dim=1)


class CrossHead(nn.Module):
    """Predict the values of each token from its final state."""

    def __init__(self, shape: CrossShape, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.modulation = Modulation(2, shape.width)
        self.proj = nn.Linear(shape.width, shape.out_values)

    def forward(self, x: Tensor, time: Tensor, times: Tensor | None) -> Tensor:
        shift, scale = self.modulation(time, times)
        return self.proj(modulated_norm(x, shift, scale, self.eps))


class CrossTransformer(nn.Module, ABC):
    """Predict a velocity for each token.

    Parts that are None are in another pipeline stage. `carry` contains the outputs of the previous stage: tokens, then
    text, image embeddings and time, which only the first stage computes.
    """

    narrow_init: ClassVar[Sequence[str]] = ()  # parts of `embed` that are initialized with a standard deviation of 0.02

    def __init__(
        self, shape: CrossShape, block: Callable[[], nn.Module], eps: float, image: nn.Module | None = None
    ) -> None:
        """Create embeddings, blocks and head. `block`: creates a block, which is called with tokens, text, image
        embeddings, modulation and layout."""
        super().__init__()
        self.shape = shape
        self.embed: CrossEmbeddings | None = CrossEmbeddings(shape, image)
        self.blocks = nn.ModuleList(block() for _ in range(shape.layers))
        self.head: CrossHead | None = CrossHead(shape, eps)

    @abstractmethod
    def angles(self, batch: Batch) -> Angles:
        """Return the rotary angles of each token, by its position."""

    def forward(self, batch: Batch, carry: Tensor | None = None) -> Outputs | Tensor:
        if self.embed is not None:
            x, text, image, time = self.embed(batch)
        else:
            x, text, image, time = self._unpacked(carry, batch)
        layout = CrossLayout(
            self.angles(batch),
            time_index(batch),
            batch.segments["latents"],
            batch.segments.get(LATENTS.own_segments, batch.segments["latents"]),
            batch.segments["text"],
            batch.segments.get("image_embeds"),
        )
        for block in self.blocks:
            if block is not None:
                x = block(x, text, image, time[:, 1:], layout)
        if self.head is None:
            parts = (text, image, time.flatten(0, 1))
            return pack_carry(x, *(part for part in parts if part is not None))
        return {PREDICTION: self.head(x, time[:, :1], layout.times)}

    def _unpacked(self, carry: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        images = len(batch["image_embeds"]) if self.shape.image_width and "image_embeds" in batch else 0
        counts = (len(batch["sample_index"]), len(batch["text"]), images, 7 * len(batch["timesteps"]))
        x, text, image, time = unpack_carry(carry, *counts)
        return x, text, image if images else None, time.view(-1, 7, time.shape[-1])

    @torch.no_grad()
    def initialize(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Initialize an unsharded parameter. The output layer is zero, so that the first prediction is zero."""
        *path, kind = name.split(".")
        if kind in ("bias", "positions") or path[:2] == ["head", "proj"]:
            tensor.zero_()
        elif "norm" in path[-1]:
            tensor.fill_(1.0)
        elif kind == "table":
            tensor.normal_(0.0, tensor.shape[-1] ** -0.5, generator=generator)
        elif path[0] == "embed" and path[1] in self.narrow_init:
            tensor.normal_(0.0, 0.02, generator=generator)
        else:
            bound = (6.0 / sum(tensor.shape)) ** 0.5
            tensor.uniform_(-bound, bound, generator=generator)


# ---------------------------------------------------------------------------------------------- costs


def batch_measures(batch: Batch) -> dict[str, np.ndarray]:
    """Return the numbers of tokens of each sample, on the host, from which FLOPs are computed."""
    names = {"tokens": "latents", "text": "text", "image_embeds": "image_embeds"}
    measures = {n: np.array(batch.segments[of].lengths) for n, of in names.items() if of in batch.segments}
    count = len(measures["tokens"])
    times = batch["timesteps"].shape[0] if "timesteps" in batch else count
    return measures | {"samples": np.full(count, times / count)}


def _work(config: CrossConfig, measures: Measures, training: Training) -> np.ndarray:
    """Return the FLOPs of one forward and backward pass for each sample."""
    shape = config.shape
    passes, first, last = (training.get(part, FULL) for part in ("blocks", "embed", "head"))
    tokens, text, times = (measures[name].astype(np.float64) for name in ("tokens", "text", "samples"))
    images = measures.get("image_embeds", np.full_like(text, shape.image_embeds))
    width, square, read = shape.width, shape.width**2, text + images
    inputs = tokens * shape.latent_values + text * shape.text_width + times * shape.time_features
    image = shape.image_width * (shape.image_width + width)
    return (
        passes.weights * 2 * shape.layers * (tokens * shape.block + read * 2 * square)
        + passes.attention * 4 * shape.layers * width * tokens * (tokens + read)
        + first.first * 2 * width * inputs
        + first.weights * 2 * (text * square + times * 7 * square + images * image)
        + last.weights * 2 * tokens * shape.out_values * width
    )


def _example(config: CrossConfig, tokens: int) -> Batch:
    """Return a batch of one sample of zeros with `tokens` latent tokens."""
    shape = config.shape
    index = torch.zeros(tokens, dtype=torch.int64)
    tensors: dict[str, Tensor] = {
        "sample_index": index,
        "positions": torch.stack([index, index, torch.arange(tokens)]),
        "latents": torch.zeros(tokens, shape.latent_values),
        "text": torch.zeros(EXAMPLE_TEXT, shape.text_width),
        "timesteps": torch.zeros(1),
    }
    segments = {"latents": Segments.of([tokens]), "text": Segments.of([EXAMPLE_TEXT])}
    if shape.image_embeds:
        tensors["image_embeds"] = torch.zeros(shape.image_embeds, shape.image_width)
        segments["image_embeds"] = Segments.of([shape.image_embeds])
    return Batch(tensors, segments, sample_ids=("example",), seeds=(0,), shapes={"latents": ((1, 1, tokens),)})
