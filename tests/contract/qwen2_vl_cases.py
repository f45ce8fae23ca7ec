"""Tiny random Qwen2-VL models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from grid_cases import QWEN_TOKENS, Grids, GridShape

from tessera.core.spec import ModelSpec
from tessera.models.qwen2_vl import SPEC
from tessera.models.qwen2_vl.config import Qwen2VLConfig


@dataclass(frozen=True)
class Shape(GridShape):
    activation: str = "quick_gelu"


SHAPES = (
    Shape(4, 2, 8, (1, 1, 2), tied=True),
    Shape(4, 4, 12, (2, 2, 2), tied=False, patch=6, vision_head_dim=12),
    Shape(6, 1, 8, (2, 1, 1), tied=False, layers=3, frames=1),
    Shape(3, 3, 16, (2, 3, 3), tied=True, merge=1, vision_heads=1, vision_head_dim=20),
    Shape(8, 2, 4, (0, 1, 1), tied=True, merge=3, theta=1e6, activation="gelu"),
    Shape(2, 1, 32, (4, 6, 6), tied=False, layers=1, vision_layers=3, vision_heads=3, activation="gelu_pytorch_tanh"),
)


class Qwen2VL(Grids):
    spec: ClassVar[ModelSpec] = SPEC
    shapes: ClassVar[tuple[Shape, ...]] = SHAPES
    tolerance: ClassVar[float] = 2e-5  # seen: below 5e-6

    def config(self, number: int, **changes: Any) -> Qwen2VLConfig:
        shape = SHAPES[number]
        vision = {"embed_dim": shape.vision_width, "mlp_ratio": 3, "hidden_act": shape.activation}
        fields = shape.fields({"bos_token_id": None}, vision, **QWEN_TOKENS, **changes)
        return Qwen2VLConfig.model_validate(fields)
