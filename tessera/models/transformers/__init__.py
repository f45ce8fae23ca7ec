"""Any class of the `transformers` library as it is, from a folder with config.json; see `model.TransformersBuilder`.

    model: {family: transformers, path: InternVL3_5-1B-HF}                # weights and configuration
    model: {family: transformers, config: {folder: InternVL3_5-1B-HF}}    # configuration alone, fresh weights

The library is imported when a model is built: it is not needed to use the other families.
"""

from __future__ import annotations

from tessera.core.spec import Component, ModelSpec
from tessera.models.transformers.config import TransformersConfig
from tessera.models.transformers.generation import continue_prompts
from tessera.models.transformers.model import TransformersBuilder
from tessera.models.transformers.processor import ClassProcessor

SPEC = ModelSpec(
    name="transformers",
    config=TransformersConfig,
    main=Component(
        build=lambda config: TransformersBuilder(config).build(),
        plan=lambda config: TransformersBuilder(config).plan(),
        weights={"hf": lambda config: TransformersBuilder(config).weights()},
        load=lambda config: TransformersBuilder(config).fresh(),
    ),
    processor=ClassProcessor.load,
    generate=continue_prompts,
    foreign=True,
    task="transformers",
)

__all__ = ["SPEC", "ClassProcessor", "TransformersBuilder", "TransformersConfig"]
