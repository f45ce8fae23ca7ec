"""Describe the rank files of Megatron jobs: names of tensors, splits over tensor ranks, layers on pipeline stages.

`files.py` reads and writes files by such a description. Names are those of unsharded tensors. The file of a rank
contains slices, with layers counted from the first of its stage. `vision.py` and `video.py` describe the families.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from tessera.weights.map import WeightMap
from tessera.weights.operations import Box, Concat, Shapes
from tessera.weights.rows import TensorRows

LOCAL_EXPERT = re.compile(r"(.*\.local_experts\.)(\d+)(\..*)")


class TensorSplit(Protocol):
    """Define how tensor parallelism splits a tensor, and how slices are joined."""

    def divide(self, tensor: TensorRows, ranks: int) -> list[TensorRows]: ...

    def join(self, slices: list[Tensor]) -> Tensor: ...

    def boxes(self, offsets: Sequence[int], sizes: Sequence[int], slices: Shapes) -> list[Box]:
        """Return (rank, offsets, sizes) in the slices of tensor ranks that together form a box of the full tensor."""
        ...

    def join_boxes(self, boxes: list[Tensor]) -> Tensor: ...

    def join_rows(self, boxes: list[Tensor]) -> TensorRows:
        """Join the boxes of the full tensor like `join_boxes`. Boxes of rows are not copied; boxes of columns are."""
        ...


@dataclass(frozen=True)
class EvenSplit:
    """Split evenly along `dim`. With `blocks` > 1, split each of the equal blocks of rows (gate and up, or q, k and v).

    `units`: number of indivisible units along `dim`, such as heads. If they do not divide evenly, the first ranks get
    one unit more. By default every element is a unit.
    """

    dim: int = 0
    blocks: int = 1
    units: int | None = None

    def divide(self, tensor: TensorRows, ranks: int) -> list[TensorRows]:
        length = self._block_length(tensor.shape)
        sizes = self._sizes(length, ranks)
        starts = [sum(sizes[:rank]) for rank in range(ranks)]
        if self.dim:
            return [tensor.narrow(self.dim, start, size) for start, size in zip(starts, sizes, strict=True)]
        return [
            TensorRows.joined(tensor.rows(block * length + start, size) for block in range(self.blocks))
            for start, size in zip(starts, sizes, strict=True)
        ]

    def join(self, slices: list[Tensor]) -> Tensor:
        blocks = zip(*(self._blocks(part) for part in slices), strict=True)
        return self._cat([part for parts in blocks for part in parts])

    def _cat(self, parts: list[Tensor]) -> Tensor:
        """Concatenate tensors. A single tensor is not copied."""
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=self.dim)

    def boxes(self, offsets: Sequence[int], sizes: Sequence[int], slices: Shapes) -> list[Box]:
        # The full tensor contains the first block of all ranks, then the second block of all ranks, and so on.
        order = [(rank, block) for block in range(self.blocks) for rank in range(len(slices))]
        lengths = [slices[rank][self.dim] // self.blocks for rank, _ in order]
        pieces = [tuple(length if dim == self.dim else 0 for dim in range(len(offsets))) for length in lengths]
        boxes: list[Box] = []
        for piece, inside, size in Concat(tuple(lengths), self.dim).boxes(offsets, sizes, pieces):
            rank, block = order[piece]
            start = inside[self.dim] + block * lengths[piece]
            boxes.append((rank, (*inside[: self.dim], start, *inside[self.dim + 1 :]), size))
        return boxes

    def join_boxes(self, boxes: list[Tensor]) -> Tensor:
        return self.join_rows(boxes).whole()

    def join_rows(self, boxes: list[Tensor]) -> TensorRows:
        return TensorRows.of(self._cat(boxes)) if self.dim else TensorRows(tuple(boxes))

    def _blocks(self, tensor: Tensor) -> tuple[Tensor, ...]:
        self._block_length(tensor.shape)
        return tensor.chunk(self.blocks, dim=self.dim)

    def _block_length(self, shape: Sequence[int]) -> int:
        if shape[self.dim] % self.blocks:
            raise ValueError(f"{shape[self.dim]} rows cannot be divided into {self.blocks} equal blocks")
        return shape[self.dim] // self.blocks

    def _sizes(self, length: int, ranks: int) -> list[int]:
        units = self.units or length
        return [(units // ranks + (rank < units % ranks)) * (length // units) for rank in range(ranks)]


@dataclass(frozen=True)
class JoinedColumns:
    """Split the columns of a layer with two concatenated inputs: the columns of each input are split evenly.

    The first input has the width of the output, so the boundary is known from the shape of a slice."""

    def divide(self, tensor: TensorRows, ranks: int) -> list[TensorRows]:
        first, rest = self._widths(tensor.shape, 1, ranks)
        whole = tensor.whole()
        blocks = ((0, first), (first * ranks, rest))
        return [
            TensorRows.of(torch.cat([whole.narrow(1, start + rank * size, size) for start, size in blocks], dim=1))
            for rank in range(ranks)
        ]

    def join(self, slices: list[Tensor]) -> Tensor:
        parts = [torch.split(part, list(self._widths(part.shape, len(slices), 1)), dim=1) for part in slices]
        return torch.cat([part[block] for block in range(2) for part in parts], dim=1)

    def boxes(self, offsets: Sequence[int], sizes: Sequence[int], slices: Shapes) -> list[Box]:
        order = [(rank, block) for block in range(2) for rank in range(len(slices))]
        lengths = [self._widths(slices[rank], len(slices), 1)[block] for rank, block in order]
        boxes: list[Box] = []
        for piece, inside, size in Concat(tuple(lengths), 1).boxes(offsets, sizes, [(0, one) for one in lengths]):
            rank, block = order[piece]
            before = self._widths(slices[rank], len(slices), 1)[0] if block else 0
            boxes.append((rank, (inside[0], inside[1] + before), size))
        return boxes

    def join_boxes(self, boxes: list[Tensor]) -> Tensor:
        return self.join_rows(boxes).whole()

    def join_rows(self, boxes: list[Tensor]) -> TensorRows:
        return TensorRows.of(boxes[0] if len(boxes) == 1 else torch.cat(boxes, dim=1))

    @staticmethod
    def _widths(shape: Sequence[int], of: int, ranks: int) -> tuple[int, int]:
        """Return the number of columns that each rank has of the first and of the second input.

        `shape` is the shape of a slice, and `of` the number of slices (1: `shape` is that of the full tensor).
        """
        first = shape[0] // of
        rest = shape[1] - first
        if shape[0] % (of * ranks) or rest < 0 or rest % ranks:
            raise ValueError(f"{shape[0]} and {shape[1] - first} columns cannot be divided by {of * ranks} ranks")
        return first // ranks, rest // ranks


ROWS, COLUMNS, GATE_AND_UP = EvenSplit(), EvenSplit(dim=1), EvenSplit(blocks=2)
QUERIES_KEYS_VALUES = EvenSplit(blocks=3)


@dataclass(frozen=True)
class PipelinePart:
    """Describe how pipeline stages divide an encoder or the decoder."""

    # name of the part in a layout, such as llm: [10, 18], and in converter options, such as llm_pp_layers
    option: Literal["vit", "llm", "audio", "dit", "dit_single"]
    layers: str  # prefix of the names of its layers
    first: tuple[str, ...]  # prefixes of tensors on the stage of the first layer
    last: tuple[str, ...]  # prefixes of tensors on the stage of the last layer
    count: int  # number of layers


@dataclass(frozen=True)
class MegatronForm:
    """Describe the weights of a configured model in Megatron-style rank files."""

    weights: WeightMap  # names in Tessera's module <-> Megatron names
    splits: tuple[
        tuple[str, TensorSplit], ...
    ]  # (regular expression of names, split); other tensors are replicated on all tensor ranks
    parts: tuple[PipelinePart, ...]
    kv_heads: int
    experts: int = 0
    tied: bool = False  # the output layer is the embedding table; in a pipeline the last stage stores a copy
    table: str = "text_decoder.embedding.word_embeddings.weight"
    head: str = "text_decoder.output_layer.weight"

    def split_of(self, name: str) -> TensorSplit | None:
        """Return how tensor parallelism splits a tensor; None if it is replicated."""
        return next((split for pattern, split in self.splits if _compiled(pattern).fullmatch(name)), None)

    def part_of(self, name: str) -> PipelinePart | None:
        """Return the part of the model (encoder or decoder) that a tensor belongs to."""
        return next((part for part in self.parts if name.startswith((part.layers, *part.first, *part.last))), None)


@functools.lru_cache(maxsize=256)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)
