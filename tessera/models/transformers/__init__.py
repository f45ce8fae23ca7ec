"""Any class of the `transformers` library as it is, from a folder with config.json; see `model.TransformersBuilder`.

    model: {family: transformers, path: InternVL3_5-1B-HF}                # weights and configuration
    model: {family: transformers, config: {folder: InternVL3_5-1B-HF}}    # configuration alone, fresh weights

The library is imported when a model is built: it is not needed to use the other families.
"""

from __future__ import annotations

from torch import nn

from tessera.core.model_plan import ModelPlan
from tessera.core.spec import Component, ModelSpec
from tessera.models.transformers.config import TransformersConfig
from tessera.models.transformers.generation import continue_prompts
from tessera.models.transformers.model import TransformersBuilder
from tessera.models.transformers.processor import ClassProcessor
from tessera.weights.map import WeightMap


# Named functions, because worker processes receive the family.
def _build(config: TransformersConfig) -> nn.Module:
    return TransformersBuilder(config).build()


def _fresh(config: TransformersConfig) -> nn.Module:
    return TransformersBuilder(config).fresh()


def _plan(config: TransformersConfig) -> ModelPlan:
    return TransformersBuilder(config).plan()


def _weights(config: TransformersConfig) -> WeightMap:
    return TransformersBuilder(config).weights()


SPEC = ModelSpec(
    name="transformers",
    config=TransformersConfig,
    main=Component(
        build=_build,
        plan=_plan,
        weights={"hf": _weights},
        load=_fresh,
    ),
    processor=ClassProcessor.load,
    generate=continue_prompts,
    foreign=True,
    task="transformers",
)

__all__ = ["SPEC", "ClassProcessor", "TransformersBuilder", "TransformersConfig"]
