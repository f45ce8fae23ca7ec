"""What a generation family gives to the tests that every such family has to pass, and how its batches are made up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any
from unittest.mock import patch

import diffusers
import torch
from torch import Tensor, nn

from tessera.core.batch import Batch, Segments
from tessera.core.spec import ModelSpec
from tessera.diffusion.family import family_of

Grid = tuple[int, int, int]  # frames, rows and columns of a sample, in patches


class GenerationFamily(ABC):
    """A family beside diffusers. `configs`: fields of config.json of small models, at least four that differ in what
    the family has to offer."""

    spec: ModelSpec
    configs: Mapping[str, Mapping[str, Any]]
    quick: Collection[str]  # configs for `make test`
    grids: Sequence[Grid] = ((2, 2, 3), (1, 3, 2))
    weight_scale: float = 0.2  # of the weights that are drawn for comparisons

    @property
    def joint(self) -> bool:
        """Whether text and latents are one sequence."""
        family = family_of(self.spec, self.config(next(iter(self.configs))))
        assert family is not None
        return family.joint

    def config(self, name: str) -> Any:
        return self.spec.config.from_hf(self.configs[name])  # type: ignore[attr-defined]

    def reference(self, config: Any) -> nn.Module:
        """Diffusers' model of our configuration."""
        fields = config.to_hf()
        kind = getattr(diffusers, fields["_class_name"])
        reference: nn.Module = kind.from_config(fields)
        return reference

    @abstractmethod
    def batch(self, config: Any, generator: torch.Generator) -> Batch:
        """A row of the samples of `grids` and padding, as the model reads it."""

    @abstractmethod
    def outputs(self, reference: Any, config: Any, batch: Batch) -> list[Tensor]:
        """What diffusers' model predicts for each sample of the batch, [tokens, values] in patches."""

    def trained(self, batch: Batch) -> Tensor:
        """The latent tokens that are not padding."""
        return torch.arange(sum(prod(grid) for grid in self.grids))


def of_dtype(batch: Batch, dtype: torch.dtype) -> Batch:
    """The same batch in another type; times stay single numbers, as everywhere."""
    keep = ("timesteps", "guidance")
    cast = {n: t.to(dtype) if t.is_floating_point() and n not in keep else t for n, t in batch.tensors.items()}
    return batch.with_tensors(**cast)


def grid_positions(grid: Grid) -> Tensor:
    return torch.cartesian_prod(*(torch.arange(size) for size in grid)).view(-1, 3).T


def cross_batch(
    grids: Sequence[Grid],
    patch_values: int,
    text: tuple[Sequence[int], int],
    generator: torch.Generator,
    padding: int = 3,
    images: tuple[Sequence[int], int] | None = None,
) -> Batch:
    """A row for a family with cross attention. `text`, `images`: embeddings of each sample, and their width."""
    lengths = [prod(grid) for grid in grids]
    tensors = {
        "latents": torch.randn(sum(lengths) + padding, patch_values, generator=generator),
        "positions": torch.cat([*map(grid_positions, grids), torch.zeros(3, padding, dtype=torch.int64)], dim=1),
        "sample_index": torch.arange(len(grids) + 1).repeat_interleave(torch.tensor([*lengths, padding])),
        "timesteps": torch.rand(len(grids) + 1, generator=generator) * 1000,
        "text": torch.randn(sum(text[0]), text[1], generator=generator),
    }
    segments = {"latents": Segments.of([*lengths, padding]), "text": Segments.of([*text[0], 0])}
    if images is not None:
        tensors["image_embeds"] = torch.randn(sum(images[0]), images[1], generator=generator)
        segments["image_embeds"] = Segments.of([*images[0], 0])
    return Batch(tensors, segments, seeds=(0,), shapes={"latents": tuple(grids)})


def samples_of(batch: Batch, name: str, segments: str = "") -> list[Tensor]:
    """A packed tensor sample by sample, without padding."""
    return list(batch[name].split(list(batch.segments[segments or name].lengths)))[:-1]


def from_patches(patches: Tensor, grid: Grid, patch_size: Grid) -> Tensor:
    """Tokens [N, C * pt * ph * pw] as a video [C, F, H, W]."""
    (f, h, w), (pt, ph, pw) = grid, patch_size
    whole = patches.view(f, h, w, -1, pt, ph, pw).permute(3, 0, 4, 1, 5, 2, 6)
    return whole.reshape(-1, f * pt, h * ph, w * pw)


def to_patches(video: Tensor, patch_size: Grid) -> Tensor:
    pt, ph, pw = patch_size
    c, f, h, w = video.shape
    split = video.reshape(c, f // pt, pt, h // ph, ph, w // pw, pw).permute(1, 3, 5, 0, 2, 4, 6)
    return split.reshape(-1, c * pt * ph * pw)


@contextmanager
def double_stays_double() -> Iterator[None]:
    """Published code casts to single numbers by `.float()`; an exact reference must not be rounded by it."""

    def cast(self: Tensor) -> Tensor:
        return self if self.dtype == torch.float64 else self.to(torch.float32)

    with patch.object(Tensor, "float", cast):
        yield
