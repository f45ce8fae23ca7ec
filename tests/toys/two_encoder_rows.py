"""A data kind of made-up rows for `two_encoders`: text with images and audio in it, with one of them, or with none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tessera.core.batch import Batch, Segments
from tessera.data.kinds import RowRequest
from tessera.runtime.rng import generator
from tests.toys.token_rows import ROWS, TokenRows
from tests.toys.two_encoders import PER_SLOT

INPUTS = {"image": "patches", "audio": "frames"}  # stream -> tensor
# What rows have, by turns. Three rows in eight lack one input and two lack both, so ranks often differ.
PRESENT = (("image", "audio"), ("audio",), (), ("image",), ("image", "audio"), (), ("image",), ("image", "audio"))


class TwoEncoderRows(TokenRows):
    def __init__(self, length: int, seed: int, values: int, present: Sequence[str]) -> None:
        super().__init__(length, 64, seed)
        self.values = values
        self.present = set(present)

    def batch(self, rows: Sequence[int]) -> Batch:
        batch = super().batch(rows)
        tensors, segments = dict(batch.tensors), dict(batch.segments)
        for stream, tensor in INPUTS.items():
            elements: list[Tensor] = []
            slots: list[Tensor] = []
            lengths: list[int] = []
            for number, row in enumerate(rows):
                if stream not in PRESENT[row % len(PRESENT)] or stream not in self.present:
                    continue
                chance = generator("cpu", self.seed, stream, row % ROWS)
                # Some sequences of different lengths. Images have the even positions of a row, audio the odd ones.
                sizes = torch.randint(1, 5, (3,), generator=chance).tolist()
                free = torch.arange(stream == "audio", self.length, 2)
                chosen = free[torch.randperm(len(free), generator=chance)[: sum(sizes)]].sort().values
                slots.append(number * self.length + chosen)
                lengths += [PER_SLOT * size for size in sizes]
                elements.append(torch.randn(PER_SLOT * sum(sizes), self.values, generator=chance))
            if elements:
                tensors |= {tensor: torch.cat(elements), f"{stream}_slots": torch.cat(slots)}
                segments[stream] = Segments.of(lengths)
        return replace(batch, tensors=tensors, segments=segments)


def KIND(request: RowRequest) -> TwoEncoderRows:
    """`data.options.present`: streams that rows may have at all; default: both."""
    options = request.section.options
    return TwoEncoderRows(request.section.length, request.seed, 6, options.get("present", tuple(INPUTS)))
