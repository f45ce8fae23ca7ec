"""The painter: a token hears its position, its time and the mean of its caption."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.core.batch import Batch
from tessera.core.outputs import LATENTS, Outputs
from tests.toys.painter.config import PainterConfig


class Painter(nn.Module):
    def __init__(self, config: PainterConfig) -> None:
        super().__init__()
        self.latents = nn.Linear(config.patch_values + 4, config.width)
        self.text = nn.Linear(config.text_width, config.width)
        self.out = nn.Linear(config.width, config.patch_values)

    def forward(self, batch: Batch) -> Outputs:
        index = batch["sample_index"]
        times = batch["timesteps"].index_select(0, index).unsqueeze(1) / 1000
        x = self.latents(torch.cat([batch["latents"], times, batch["positions"].T.to(times)], 1))
        lengths = torch.tensor(batch.segments["text"].lengths, device=index.device)
        samples = torch.repeat_interleave(lengths)
        sums = x.new_zeros(len(lengths), x.shape[1]).index_add(0, samples, self.text(batch["text"].to(x)))
        x = x + (sums / lengths.clamp(min=1).unsqueeze(1)).index_select(0, index)
        return {LATENTS: self.out(F.silu(x))}

    def initialize(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        tensor.zero_() if name.endswith("bias") else tensor.normal_(0, 0.2, generator=generator)
