"""Qwen3-VL, dense and with experts: features of several depths of the tower, clips with their seconds as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tessera.core.types import ModelSpec, Processor
from tessera.models.qwen3_vl.config import SPELLINGS, Qwen3VLConfig
from tessera.models.qwen3_vl.example import example
from tessera.models.qwen3_vl.flops import flops, work
from tessera.models.qwen3_vl.model import build
from tessera.models.qwen3_vl.plan import plan
from tessera.models.qwen3_vl.presets import PRESETS
from tessera.models.qwen3_vl.weights import weights


def _processor(config: Qwen3VLConfig, folder: Path, **options: Any) -> Processor:
    # Imported when first used: a model without its processor needs no tokenizer and no image library.
    from tessera.models.qwen3_vl.processor import Qwen3VLProcessor

    return Qwen3VLProcessor.load(config, folder, **options)


SPEC = ModelSpec(
    name="qwen3_vl",
    config=Qwen3VLConfig,
    build=build,
    plan=plan,
    weights=weights,
    processor=_processor,
    flops=flops,
    work=work,
    example=example,
    presets=PRESETS,
    task="language",
    hf_types=tuple(SPELLINGS),
)
