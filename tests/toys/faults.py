"""Faults to survive: a chat set with samples that spoil a step, and a weight whose bit flips while training runs.

data: {kind: tests.toys.faults, options: {nan_pixels: [id, ...], absurd_labels: [id, ...]}}
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tessera.core.batch import Batch
from tessera.core.callback import Callback
from tessera.core.row_source import RowSource
from tessera.core.sample import Encoded
from tessera.data.kinds import RowRequest, chat
from tessera.data.order.packed_rows import PackedRows
from tessera.runtime.modules import clean_name, local_shard


class Spoiled:
    """A processor that gives bad numbers for some samples, each time it is asked."""

    def __init__(self, processor: Any, nan_pixels: list[str], absurd_labels: list[str]) -> None:
        self.processor = processor
        self.nan_pixels, self.absurd_labels = set(nan_pixels), set(absurd_labels)

    def __getattr__(self, name: str) -> Any:
        if name == "processor":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.processor, name)

    def encode(self, sample: Any, media: Any, sizes: Any = None) -> Encoded:
        encoded: Encoded = self.processor.encode(sample, media, sizes)
        if sample.id in self.absurd_labels:
            encoded.labels = torch.arange(len(encoded.labels)) * 97 % 300 + 200
        return encoded

    def collate(self, rows: Sequence[Sequence[Encoded]], length: int) -> Batch:
        """Pixels travel as bytes, which are always numbers; here as what they mean, which may be none."""
        batch: Batch = self.processor.collate(rows, length)
        pixels, scale = batch.get("pixels"), batch.get("pixel_scale")
        if pixels is None:
            return batch
        if not pixels.is_floating_point():
            assert scale is not None
            pixels = torch.addcmul(scale[1], pixels.float(), scale[0])
        at = 0
        for encoded in (item for row in rows for item in row if "vision" in item.streams):
            count = len(encoded.streams["vision"].tensors["pixels"])
            if encoded.id in self.nan_pixels:
                pixels[at : at + count] = float("nan")
            at += count
        return batch.with_tensors(pixels=pixels)


def build(request: RowRequest) -> RowSource:
    rows = chat.build(request)
    assert isinstance(rows, PackedRows)
    options = request.section.options
    if request.split == "train":
        processor: Any = Spoiled(rows.processor, options.get("nan_pixels", []), options.get("absurd_labels", []))
        rows.processor = processor
    return rows


KIND = build


class FlipBit(Callback):
    """Once, before a step: the highest bit of the exponent of one number of a weight."""

    def __init__(self, step: int, name: str, bit: int = 30) -> None:
        self.step, self.target, self.bit = step, name, bit
        self.done = False

    @torch.no_grad()
    def on_step_begin(self, trainer: Any) -> None:
        if self.done or trainer.step + 1 != self.step:
            return
        self.done = True
        for name, parameter in trainer.module.named_parameters():
            part = local_shard(parameter)
            if clean_name(name) == self.target and part.numel():
                number = part.detach().flatten()[:1].clone()
                flipped = (number.view(torch.int32) ^ (1 << self.bit)).view(torch.float32)
                part.view(-1)[:1].copy_(flipped)
