"""Two models as a user would write them: a plain module that knows nothing of Tessera, and one that shards itself."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from tessera.core.batch import Batch
from tessera_compat.mindspeed_mm.fsdp2 import set_fullyshard_modules_to_wrap, set_recompute_modules_to_wrap
from tessera_compat.mindspeed_mm.mixins import FSDP2Mixin, MultiModalModule, WeightInitMixin


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class PlainNet(nn.Module):
    """Tells digits apart. Two tables live in buffers that are not saved: one computed, one drawn at random."""

    window: Tensor
    features: Tensor

    def __init__(self, width: int = 16, depth: int = 2, classes: int = 10) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(64) + 0.5, persistent=False)
        self.register_buffer("features", torch.randn(64, width) / 8, persistent=False)
        self.inlet = nn.Linear(64, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        pixels = pixels * self.window.to(pixels.dtype)
        x = self.inlet(pixels) + pixels @ self.features.to(pixels.dtype)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x), labels)


class Tempered(PlainNet):
    """With a temperature that is learned, a single number, as CLIP has one; and one in a block of its own."""

    def __init__(self, width: int = 16, depth: int = 2, classes: int = 10) -> None:
        super().__init__(width, depth, classes)
        self.logit_scale = nn.Parameter(torch.tensor(0.5))
        self.blocks[0].gate = nn.Parameter(torch.tensor(1.5))

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        x = self.inlet(pixels * self.window.to(pixels.dtype)) * self.blocks[0].gate
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x) * self.logit_scale.exp(), labels)


class TwoEncoders(MultiModalModule, FSDP2Mixin, WeightInitMixin):
    """A picture and a number, each through an encoder of its own; only the last layers of the first one are trained."""

    def __init__(self, width: int = 16) -> None:
        super().__init__({"width": width})
        self.picture = nn.Sequential(nn.Linear(64, width), Block(width), Block(width))
        self.number = nn.Embedding(10, width)
        self.fuse = Block(width)
        self.picture[0].requires_grad_(False)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        distance = (self.picture(batch["pixels"]) - self.fuse(self.number(batch["labels"]))).square().mean(1)
        return {"loss": distance.mean(), "count": torch.tensor(len(distance))}

    def _fully_shard(self, fsdp2_kwargs: dict[str, Any], fsdp2_config: Any) -> None:
        set_recompute_modules_to_wrap(self, ["picture.1"])
        fully_shard(self.fuse, **fsdp2_kwargs)
        set_fullyshard_modules_to_wrap(self, ["picture.2"], **fsdp2_kwargs)
