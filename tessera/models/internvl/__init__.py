"""InternVL 2.5, 3 and 3.5 in their Hugging Face form: pictures as tiles of one size, read among the words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tessera.core.types import ModelSpec, Processor
from tessera.models.internvl.config import InternVLConfig
from tessera.models.internvl.example import example
from tessera.models.internvl.flops import flops, work
from tessera.models.internvl.model import build
from tessera.models.internvl.plan import plan
from tessera.models.internvl.presets import PRESETS
from tessera.models.internvl.weights import weights


def _processor(config: InternVLConfig, folder: Path, **options: Any) -> Processor:
    # Imported when first used: a model without its processor needs no tokenizer and no image library.
    from tessera.models.internvl.processor import InternVLProcessor

    return InternVLProcessor.load(config, folder, **options)


SPEC = ModelSpec(
    name="internvl",
    config=InternVLConfig,
    build=build,
    plan=plan,
    weights=weights,
    processor=_processor,
    flops=flops,
    work=work,
    example=example,
    presets=PRESETS,
    task="language",
    hf_types=("internvl",),
)
