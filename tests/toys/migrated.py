"""The migration example of MindSpeed-MM's guide, written out: a model of one's own with the mixins, and a data set."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from tessera_compat.mindspeed_mm.fsdp2 import (
    set_fullyshard_modules_to_wrap,
    set_modules_to_prefetch,
    set_recompute_modules_to_wrap,
)
from tessera_compat.mindspeed_mm.mixins import FSDP2Mixin, MultiModalModule, WeightInitMixin

VOCABULARY = 17


class Rotation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.roll(1, -1)


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.mlp(self.norm(x)))


class Decoder(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))


class TextDecoder(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.rotary_pos_emb = Rotation()
        self.decoder = Decoder(width, depth)
        self.output_layer = nn.Linear(width, VOCABULARY, bias=False)


def build_parts(model: Any, width: int, depth: int) -> None:
    model.image_encoder = nn.Linear(6, width).requires_grad_(False)
    model.text_decoder = TextDecoder(width, depth)


def compute(model: Any, input_ids: Tensor, pixels: Tensor, labels: Tensor) -> Tensor:
    text = model.text_decoder
    x = text.embedding(input_ids) + model.image_encoder(pixels).unsqueeze(1)
    x = text.rotary_pos_emb(x)
    for layer in text.decoder.layers:
        x = layer(x)
    return F.cross_entropy(text.output_layer(x).flatten(0, 1), labels.flatten())


class PlainModel(nn.Module):
    """The same without the mixins."""

    def __init__(self, config: dict[str, int]) -> None:
        super().__init__()
        build_parts(self, **config)

    def forward(self, input_ids: Tensor, pixels: Tensor, labels: Tensor) -> Tensor:
        return compute(self, input_ids, pixels, labels)

    def init_weights(self) -> None:
        WeightInitMixin.init_weights(self)  # type: ignore[arg-type]

    _init_weights = WeightInitMixin._init_weights


class CustomModel(MultiModalModule, FSDP2Mixin, WeightInitMixin):
    def __init__(self, config: dict[str, int]) -> None:
        super().__init__(config)
        build_parts(self, **config)

    def forward(self, input_ids: Tensor, pixels: Tensor, labels: Tensor) -> Tensor:
        return compute(self, input_ids, pixels, labels)


class YourModel(CustomModel):
    """Shards itself with the helpers, called as the guide prints them."""

    def _fully_shard(self, fsdp2_kwargs: Any = None, fsdp2_config: Any = None) -> None:
        set_recompute_modules_to_wrap()

        set_fullyshard_modules_to_wrap()

        num_to_forward_prefetch = getattr(self.fsdp2_config, "num_to_forward_prefetch", 0)
        num_to_backward_prefetch = getattr(self.fsdp2_config, "num_to_backward_prefetch", 0)
        set_modules_to_prefetch(num_to_forward_prefetch, num_to_backward_prefetch)


class CustomDataset(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        chance = torch.Generator().manual_seed(number)
        tokens = torch.randint(VOCABULARY, (6,), generator=chance)
        return {"input_ids": tokens, "pixels": torch.randn(6, generator=chance), "labels": tokens.roll(-1)}
