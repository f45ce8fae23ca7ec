"""Wan whose initial weights are all drawn: as published, its output begins as zero and nothing else learns."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tessera.diffusion.wan import SPEC as WAN
from tessera.diffusion.wan.model import WanModel


class DrawnWan(WanModel):
    @torch.no_grad()
    def initialize(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        tensor.normal_(1.0 if "norm" in name else 0.0, 0.2, generator=generator)


SPEC = replace(WAN, name="drawn_wan", main=replace(WAN.main, build=DrawnWan), hf_types=(), originals={})
