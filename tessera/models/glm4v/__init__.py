"""GLM-4.1V: pictures of any size and clips with the seconds of their frames written beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tessera.core.types import ModelSpec, Processor
from tessera.models.glm4v.config import Glm4vConfig
from tessera.models.glm4v.example import example
from tessera.models.glm4v.flops import flops, work
from tessera.models.glm4v.model import build
from tessera.models.glm4v.plan import plan
from tessera.models.glm4v.presets import PRESETS
from tessera.models.glm4v.weights import weights


def _processor(config: Glm4vConfig, folder: Path, **options: Any) -> Processor:
    # Imported when first used: a model without its processor needs no tokenizer and no image library.
    from tessera.models.glm4v.processor import Glm4vProcessor

    return Glm4vProcessor.load(config, folder, **options)


SPEC = ModelSpec(
    name="glm4v",
    config=Glm4vConfig,
    build=build,
    plan=plan,
    weights=weights,
    processor=_processor,
    flops=flops,
    work=work,
    example=example,
    presets=PRESETS,
    task="language",
    hf_types=("glm4v",),
)
