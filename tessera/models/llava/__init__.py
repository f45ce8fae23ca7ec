"""LLaVA 1.5 and LLaVA-OneVision: a CLIP or SigLIP tower, a small projector, and a language model that reads its
features among the words. OneVision sees a single picture in tiles, several as they are, and clips."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tessera.core.types import ModelSpec, Processor
from tessera.models.llava.config import PLAIN_TYPE, TILED_TYPE, LlavaConfig
from tessera.models.llava.example import example
from tessera.models.llava.flops import flops, work
from tessera.models.llava.model import build
from tessera.models.llava.plan import plan
from tessera.models.llava.presets import PRESETS
from tessera.models.llava.weights import weights


def _processor(config: LlavaConfig, folder: Path, **options: Any) -> Processor:
    # Imported when first used: a model without its processor needs no tokenizer and no image library.
    from tessera.models.llava.processor import LlavaProcessor

    return LlavaProcessor.load(config, folder, **options)


SPEC = ModelSpec(
    name="llava",
    config=LlavaConfig,
    build=build,
    plan=plan,
    weights=weights,
    processor=_processor,
    flops=flops,
    work=work,
    example=example,
    presets=PRESETS,
    task="language",
    hf_types=(PLAIN_TYPE, TILED_TYPE),
)
