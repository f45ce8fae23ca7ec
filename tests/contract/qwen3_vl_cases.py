"""Tiny random Qwen3-VL models, dense and with experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy as np
from grid_cases import QWEN_TOKENS, Grid, Grids, GridShape
from language_cases import experts_of
from torch import Tensor
from vision_language import Pair

from tessera.core.spec import ModelSpec
from tessera.models.qwen3_vl import SPEC
from tessera.models.qwen3_vl.config import Qwen3VLConfig
from tessera.models.qwen3_vl.model import bilinear_positions


@dataclass(frozen=True)
class Shape(GridShape):
    hidden: int = 24
    layers: int = 3
    vision_layers: int = 3
    taps: tuple[int, ...] = (0, 1)
    table: int = 25
    activation: str = "gelu_pytorch_tanh"
    experts: dict[str, Any] | None = field(default=None, hash=False)


experts = partial(experts_of, moe_intermediate_size=16)
SHAPES = (
    Shape(4, 2, 8, (2, 1, 1), tied=True),
    Shape(4, 4, 12, (2, 2, 2), tied=False, patch=6, vision_head_dim=12, taps=(0, 1, 2), table=49),
    Shape(6, 1, 8, (2, 1, 1), tied=False, layers=2, frames=1, taps=(1, 2), activation="gelu"),
    Shape(3, 3, 16, (4, 2, 2), tied=True, merge=1, vision_heads=1, vision_head_dim=20, taps=(0,), table=9),
    Shape(8, 2, 4, (1, 0, 1), tied=True, merge=3, theta=5e6, taps=()),
    Shape(2, 1, 32, (6, 5, 5), tied=False, hidden=40, vision_layers=4, taps=(0, 2, 3), table=64),
    Shape(4, 2, 8, (2, 1, 1), tied=False, experts=experts(4, 2)),
    Shape(4, 1, 8, (2, 1, 1), tied=True, layers=4, taps=(1,), experts=experts(5, 3, decoder_sparse_step=2)),
    Shape(2, 2, 16, (4, 2, 2), tied=False, hidden=20, taps=(0, 2), experts=experts(3, 2, mlp_only_layers=[1])),
    Shape(4, 4, 8, (2, 1, 1), tied=False, taps=(), experts=experts(8, 4)),
    Shape(4, 2, 8, (2, 1, 1), tied=True, table=1, merge=1, experts=experts(6, 2, moe_intermediate_size=24)),
)
EXPERTS = [number for number, shape in enumerate(SHAPES) if shape.experts]


class Qwen3VL(Grids):
    spec: ClassVar[ModelSpec] = SPEC
    shapes: ClassVar[tuple[Shape, ...]] = SHAPES
    folders: ClassVar[Sequence[int]] = (0, 1, 4, *EXPERTS)
    quick: ClassVar[Sequence[int]] = (0, 6)
    quick_folders: ClassVar[Sequence[int]] = (1, 6)
    alone: ClassVar[Sequence[int]] = (0, 6)
    between: ClassVar[Callable[..., tuple[np.ndarray, np.ndarray]] | None] = staticmethod(bilinear_positions)

    def config(self, number: int, **changes: Any) -> Qwen3VLConfig:
        shape = SHAPES[number]
        text = {
            "hidden_size": shape.hidden,
            "head_dim": shape.head_dim,
            "experts": shape.experts,
            "bos_token_id": None,
        }
        vision = {
            "hidden_size": shape.vision_width,
            "intermediate_size": 28,
            "num_position_embeddings": shape.table,
            "deepstack_visual_indexes": shape.taps,
            "hidden_act": shape.activation,
        }
        return Qwen3VLConfig.model_validate(shape.fields(text, vision, **QWEN_TOKENS, **changes))

    def written(self, config: Any, kind: str, grid: Grid, words: Callable[..., list[int]]) -> list[int]:
        """A clip is a run of visual tokens for each step along time, with words between them that stand for seconds."""
        return [
            token for _ in range(grid[0]) for token in super(Qwen3VL, self).written(config, kind, (1, *grid[1:]), words)
        ]

    def gradients(self, pair: Pair) -> dict[str, Tensor | None]:
        """Those of experts are turned, as the hub's folders store them."""
        grads = super().gradients(pair)
        for name, grad in grads.items():
            if grad is not None and ".experts." in name and grad.shape[-1] != grad.shape[-2]:
                grads[name] = grad.transpose(-1, -2)
        return grads
