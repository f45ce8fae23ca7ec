"""Any class of the `transformers` library as it is, from a folder with config.json; see `model.TransformersModel`.

    model: {family: transformers, path: InternVL3_5-1B-HF}                # weights and configuration
    model: {family: transformers, config: {folder: InternVL3_5-1B-HF}}    # configuration alone, fresh weights

The library is imported when a model is built: it is not needed to use the other families.
"""

from __future__ import annotations

from tessera.core.types import ModelSpec
from tessera.models.transformers.config import TransformersConfig
from tessera.models.transformers.hub import ModelHub
from tessera.models.transformers.model import TransformersModel
from tessera.models.transformers.side_files import SideFiles

SPEC = ModelSpec(
    name="transformers",
    config=TransformersConfig,
    build=lambda config: TransformersModel(config).build(),
    plan=lambda config: TransformersModel(config).plan(),
    weights=lambda config: TransformersModel(config).weights(),
    processor=SideFiles.load,
    fresh=lambda config: TransformersModel(config).fresh(),
    needs_processor_files=False,
    task="transformers",
)

__all__ = ["SPEC", "ModelHub", "SideFiles", "TransformersConfig", "TransformersModel"]
