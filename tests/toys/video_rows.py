"""A data kind of drawn-up features of videos: clean latents in patches and embeddings of captions, packed into rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tessera.core.batch import Batch, Segments
from tessera.core.row_source import RowSource
from tessera.data.kinds import RowRequest
from tessera.runtime.rng import derive, generator

ROWS = 64
GRIDS = ((4, 3, 3), (2, 4, 4), (6, 2, 3), (1, 4, 6))  # frames, rows and columns of a sample
PATCH_VALUES = 16
TEXT_WIDTH = 12
IMAGE_WIDTH = 10


class VideoRows(RowSource):
    def __init__(self, length: int, seed: int, images: int) -> None:
        self.length = length
        self.seed = seed
        self.images = images  # image embeddings of each sample

    def __len__(self) -> int:
        return ROWS

    def batch(self, rows: Sequence[int]) -> Batch:
        numbers = [row % ROWS for row in rows]
        drawn = [self._row(n) for n in numbers]
        lengths = {name: [n for _, found, _ in drawn for n in found[name]] for name in drawn[0][1]}
        tensors = {
            name: torch.cat([row[name] for row, _, _ in drawn], dim=1 if name == "positions" else 0)
            for name in drawn[0][0]
        }
        tensors["trained"] = torch.cat([row["trained"] + at * self.length for at, (row, _, _) in enumerate(drawn)])
        tensors["sample_index"] = torch.arange(len(lengths["latents"])).repeat_interleave(
            torch.tensor(lengths["latents"])
        )
        return Batch(
            tensors,
            {name: Segments.of(found) for name, found in lengths.items()},
            sample_ids=tuple(f"row-{n}" for n in numbers),
            counts={"samples": len(numbers), "tokens": len(numbers) * self.length},
            seeds=tuple(derive(self.seed, "row", n) for n in numbers),
            shapes={"latents": tuple(shape for _, _, shapes in drawn for shape in shapes)},
        )

    def _row(self, number: int) -> tuple[dict[str, Tensor], dict[str, list[int]], list[tuple[int, ...]]]:
        """Return a few videos and padding behind them. Captions have lengths of their own; padding has none."""
        chance = generator("cpu", self.seed, "row", number)
        shapes: list[tuple[int, ...]] = []
        positions, at = [], 0
        while True:
            grid = GRIDS[int(torch.randint(0, len(GRIDS), (), generator=chance))]
            size = grid[0] * grid[1] * grid[2]
            if at + size > self.length - 3:
                break
            shapes.append(grid)
            positions.append(torch.cartesian_prod(*(torch.arange(n) for n in grid)).T)
            at += size
        rest = self.length - at
        positions.append(torch.zeros(3, rest, dtype=torch.int64))
        text = [int(torch.randint(2, 6, (), generator=chance)) for _ in shapes]
        lengths = {"latents": [*(f * h * w for f, h, w in shapes), rest], "text": [*text, 0]}
        tensors = {
            "clean": torch.randn(self.length, PATCH_VALUES, generator=chance),
            "positions": torch.cat(positions, dim=1),
            "text": torch.randn(sum(text), TEXT_WIDTH, generator=chance),
            "trained": torch.arange(at),
        }
        if self.images:
            lengths["image_embeds"] = [*(self.images for _ in shapes), 0]
            tensors["image_embeds"] = torch.randn(self.images * len(shapes), IMAGE_WIDTH, generator=chance)
        return tensors, lengths, [*shapes, (1, 1, rest)]


def KIND(request: RowRequest) -> VideoRows:
    return VideoRows(request.section.length, request.seed, request.section.options.get("images", 0))
