"""Tiny random Qwen2.5-VL models; their batches lie window by window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from grid_cases import QWEN_TOKENS, Grids, GridShape, Item
from torch import Tensor
from vision_language import Case

from tessera.core.batch import Batch, Segments
from tessera.core.spec import ModelSpec
from tessera.models.qwen2_5_vl import SPEC
from tessera.models.qwen2_5_vl.config import Qwen25VLConfig
from tessera.models.qwen2_5_vl.model import window_order, window_sizes

SECONDS = (0.5, 1.3, 1.0, 0.3)  # that one temporal patch of each clip stands for, in turn


@dataclass(frozen=True)
class Shape(GridShape):
    """`window`: tokens along its side."""

    window: int = 2
    full: tuple[int, ...] = (1,)
    vision_layers: int = 3
    per_second: int = 2
    activation: str = "silu"
    eps: float = 1e-6


SHAPES = (
    Shape(4, 2, 8, (1, 1, 2), tied=True),
    Shape(4, 4, 12, (2, 2, 2), tied=False, patch=6, vision_head_dim=12, full=(0, 2), per_second=4),
    Shape(6, 1, 8, (2, 1, 1), tied=False, layers=3, frames=1, window=3, full=(7,), eps=1e-5),
    Shape(3, 3, 16, (2, 3, 3), tied=True, merge=1, vision_heads=1, vision_head_dim=20, window=4, per_second=25),
    Shape(8, 2, 4, (0, 1, 1), tied=True, merge=3, theta=1e6, activation="gelu", window=1, full=(2,)),
    Shape(2, 1, 32, (4, 6, 6), tied=False, layers=1, vision_layers=4, vision_heads=3, full=(0, 1, 2, 3)),
)


class Qwen25VL(Grids):
    spec: ClassVar[ModelSpec] = SPEC
    shapes: ClassVar[tuple[Shape, ...]] = SHAPES
    tolerance: ClassVar[float] = 2e-5  # seen: below 6e-6

    def config(self, number: int, **changes: Any) -> Qwen25VLConfig:
        shape = SHAPES[number]
        vision = {
            "hidden_size": shape.vision_width,
            "intermediate_size": 20,
            "tokens_per_second": shape.per_second,
            "window_size": shape.window * shape.merge * shape.patch,
            "fullatt_block_indexes": shape.full,
            "hidden_act": shape.activation,
        }
        text = {"rms_norm_eps": shape.eps, "bos_token_id": None}
        return Qwen25VLConfig.model_validate(shape.fields(text, vision, **QWEN_TOKENS, **changes))

    def media(self, number: int) -> dict[str, list[Any]]:
        """Whole windows, cut ones, one token small."""
        m = SHAPES[number].merge
        return {
            **super().media(number),
            "several": [("image", (1, 4 * m, 4 * m)), ("image", (1, 3 * m, m)), ("image", (1, m, m))],
            "mixed": [("video", (2, m, 2 * m)), ("image", (1, 2 * m, 3 * m)), ("video", (4, 3 * m, m))],
        }

    def shown_to(self, items: Sequence[Item]) -> dict[str, Tensor]:
        clips = sum(kind == "video" for kind, _, _ in items)
        seconds = {"second_per_grid_ts": torch.tensor([SECONDS[n % 4] for n in range(clips)])} if clips else {}
        return {**super().shown_to(items), **seconds}

    def pack(self, config: Any, cases: Sequence[Case], padding: int = 0) -> Batch:
        batch = super().pack(config, cases, padding)
        items = [item for case in cases for item in case.media.items]
        if not items:
            return batch
        vision, order, windows, start = config.vision, [], [], 0
        merge, block = vision.spatial_merge_size, vision.spatial_merge_size**2
        for _, (t, h, w), _ in items:
            for _ in range(t):
                rows, columns = h // merge, w // merge
                order.append(torch.from_numpy(window_order(rows, columns, vision.window)) + start)
                windows += [block * size for size in window_sizes(rows, columns, vision.window)]
                start += rows * columns
        tokens = torch.cat(order)
        patches = (tokens[:, None] * block + torch.arange(block)).flatten()
        moved: dict[str, Tensor] = {name: batch[name][patches] for name in ("pixels", "patch_positions")}
        moved["media_slots"] = batch["media_slots"][tokens]
        segments = {**batch.segments, "vision.windows": Segments.of(windows)}
        return replace(batch.with_tensors(**moved), segments=segments)
