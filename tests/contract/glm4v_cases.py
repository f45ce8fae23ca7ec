"""Tiny random GLM-4.1V models. Pictures and the frames of clips have one word."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from grid_cases import INPUTS, Grid, Grids, GridShape
from vision_language import Case, Pair

from tessera.core.spec import ModelSpec
from tessera.models.glm4v import SPEC
from tessera.models.glm4v.config import Glm4vConfig
from tessera.models.glm4v.model import bicubic_positions

TOKENS = {
    "image_start_token_id": 84,
    "image_end_token_id": 85,
    "video_start_token_id": 86,
    "video_end_token_id": 87,
    "image_token_id": 88,
    "video_token_id": 89,
}


@dataclass(frozen=True)
class Shape(GridShape):
    turned: float = 0.5
    vision_bias: bool = False
    table: int = 5
    eps: float = 1e-5


SHAPES = (
    Shape(4, 2, 8, (0, 1, 1), tied=False),
    Shape(4, 4, 12, (2, 2, 2), tied=True, turned=1.0, patch=6, vision_head_dim=12, table=3),
    Shape(6, 1, 16, (1, 1, 2), tied=False, layers=3, frames=1, vision_bias=True),
    Shape(3, 3, 16, (0, 1, 1), tied=True, turned=0.25, merge=1, vision_heads=1, vision_head_dim=20, table=8),
    Shape(8, 2, 8, (1, 1, 1), tied=False, turned=0.75, merge=3, theta=5e5, table=1, eps=1e-6),
    Shape(2, 1, 32, (2, 3, 3), tied=False, layers=1, vision_layers=3, vision_heads=3, table=24),
)


class Glm4v(Grids):
    spec: ClassVar[ModelSpec] = SPEC
    shapes: ClassVar[tuple[Shape, ...]] = SHAPES
    quick: ClassVar[Sequence[int]] = (0, 3)
    first_word: ClassVar[int] = 3
    between: ClassVar[Callable[..., tuple[np.ndarray, np.ndarray]] | None] = staticmethod(bicubic_positions)

    def config(self, number: int, **changes: Any) -> Glm4vConfig:
        shape = SHAPES[number]
        text = {
            "partial_rotary_factor": shape.turned,
            "rms_norm_eps": shape.eps,
            "eos_token_id": (1, 2),
            "pad_token_id": None,
        }
        vision = {
            "hidden_size": shape.vision_width,
            "intermediate_size": 28,
            "attention_bias": shape.vision_bias,
            "image_size": shape.table * shape.patch + 1,
        }
        return Glm4vConfig.model_validate(shape.fields(text, vision, **TOKENS, **changes))

    def written(self, config: Any, kind: str, grid: Grid, words: Callable[..., list[int]]) -> list[int]:
        """Behind each step of a clip along time stands the second at which it was shown."""
        t, h, w = grid
        still = [config.image_token_id] * (h * w // config.vision.spatial_merge_size**2)
        still = [config.image_start_token_id, *still, config.image_end_token_id]
        if kind == "image":
            return [*still, *words()]
        steps = [token for _ in range(t) for token in (*still, *words(1, 3))]
        return [config.video_start_token_id, *steps, config.video_end_token_id, *words()]

    def inputs(self, pair: Pair, case: Case) -> dict[str, Any]:
        """Transformers' forward takes pictures or clips; for both together the embeddings are put in place here."""
        inputs = super().inputs(pair, case)
        if len({kind for kind, _, _ in case.media.items}) < 2:
            return inputs
        model, kinds = pair.reference.model, case.media.kinds
        embedded = model.get_input_embeddings()(case.tokens)
        for mark, (kind, (pixels, grids)) in enumerate(INPUTS.items(), start=1):
            features = getattr(model, f"get_{kind}_features")(inputs[pixels], inputs[grids]).pooler_output
            embedded = embedded.index_copy(0, (kinds == mark).nonzero()[:, 0], torch.cat(list(features)))
        return {"inputs_embeds": embedded[None], "position_ids": inputs["position_ids"]}
