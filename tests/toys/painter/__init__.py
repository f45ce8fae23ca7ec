"""A whole generation family in one folder, with a VAE of its own: nothing elsewhere names it."""

from __future__ import annotations

import numpy as np
import torch

from tessera.core.batch import Batch, Segments
from tessera.core.model_plan import ModelPlan
from tessera.core.spec import Training
from tessera.diffusion.cross import LATENTS, batch_measures
from tessera.diffusion.spec import generation_family
from tessera.models.text.costs import Measures
from tessera.weights.map import Rule, WeightMap
from tests.toys.painter.config import PainterConfig
from tests.toys.painter.model import Painter

_LAYERS = ("latents", "text", "out")


def plan(config: PainterConfig) -> ModelPlan:
    styles = {f"{name}.{{weight,bias}}": "replicate" for name in _LAYERS}
    return ModelPlan(blocks=(), tensor=styles, streams={"latents": LATENTS})  # type: ignore[arg-type]


def weights(config: PainterConfig) -> WeightMap:
    return WeightMap(tuple(Rule(f"{name}.{{kind}}", f"painter.{name}.{{kind}}") for name in _LAYERS))


def work(config: PainterConfig, measures: Measures, training: Training) -> np.ndarray:
    flops: np.ndarray = measures["tokens"] * 12.0 * config.width * config.patch_values
    return flops


def example(config: PainterConfig, tokens: int) -> Batch:
    index = torch.zeros(tokens, dtype=torch.int64)
    tensors = {
        "sample_index": index,
        "positions": torch.stack([index, index, torch.arange(tokens)]),
        "latents": torch.zeros(tokens, config.patch_values),
        "text": torch.zeros(6, config.text_width),
        "timesteps": torch.zeros(1),
    }
    segments = {"latents": Segments.of([tokens]), "text": Segments.of([6])}
    return Batch(tensors, segments, {"latents": ((1, 1, tokens),)}, sample_ids=("example",), seeds=(0,))


SPEC = generation_family(
    "painter",
    PainterConfig,
    {"quickstart": {}},
    build=Painter,
    plan=plan,
    weights=weights,
    work=work,
    measures=batch_measures,
    example=example,
)
