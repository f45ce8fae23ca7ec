"""A data kind of made-up features of images: latents in patches, embeddings of captions, reference images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import prod

import torch

from tessera.core.batch import Batch
from tessera.core.row_source import RowSource
from tessera.data.kinds import RowRequest
from tessera.diffusion.family import GenerationFamily
from tessera.diffusion.processor import GenerationProcessor
from tessera.diffusion.qwen_image.config import QwenImageFamily
from tessera.diffusion.samples import EncodedMedia, GenerationOptions
from tessera.diffusion.sd3.config import SD3Family
from tessera.runtime.rng import derive, generator

ROWS = 64
GRIDS = ((1, 4, 5), (1, 3, 3), (1, 2, 6))
CHANNELS = 2
TEXT_WIDTH = 12
POOLED_WIDTH = 6


class ImageRows(RowSource):
    def __init__(self, length: int, seed: int, positions: str) -> None:
        self.length = length
        self.seed = seed
        shape = {"channels": CHANNELS, "patch": (1, 2, 2), "joint": True}
        families = {"grid": GenerationFamily, "centered": QwenImageFamily, "table": partial(SD3Family, table=8)}
        self.processor = GenerationProcessor(families[positions](**shape), GenerationOptions(), None, ())

    def __len__(self) -> int:
        return ROWS

    def batch(self, rows: Sequence[int]) -> Batch:
        numbers = [row % ROWS for row in rows]
        packed = self.processor.collate([self._row(n) for n in numbers], self.length)
        return replace(
            packed,
            sample_ids=tuple(f"row-{n}" for n in numbers),
            counts={"samples": len(numbers), "tokens": len(numbers) * self.length},
            seeds=tuple(derive(self.seed, "row", n) for n in numbers),
        )

    def _row(self, number: int) -> list[EncodedMedia]:
        """Return a few images with captions of several lengths; every other one is made from another image."""
        chance = generator("cpu", self.seed, "row", number)
        items: list[EncodedMedia] = []
        while True:
            grid = GRIDS[int(torch.randint(len(GRIDS), (), generator=chance))]
            text = int(torch.randint(2, 6, (), generator=chance))
            references = ((1, 2, 2),) if len(items) % 2 else ()
            latents = prod(grid) + sum(map(prod, references))
            if sum(item.length for item in items) + text + latents > self.length - 3:
                return items
            tensors = {
                "clean": torch.randn(latents, 4 * CHANNELS, generator=chance),
                "text": torch.randn(text, TEXT_WIDTH, generator=chance),
                "pooled": torch.randn(1, POOLED_WIDTH, generator=chance),
            }
            items.append(EncodedMedia(f"{number}-{len(items)}", text + latents, grid, text, tensors, references))


def KIND(request: RowRequest) -> ImageRows:
    return ImageRows(request.section.length, request.seed, request.section.options.get("positions", "grid"))
