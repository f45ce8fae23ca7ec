"""Qwen2.5-VL: as Qwen2-VL, with a tower whose blocks mostly look inside windows, and clips that follow real time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tessera.core.types import ModelSpec, Processor
from tessera.models.qwen2_5_vl.config import Qwen25VLConfig
from tessera.models.qwen2_5_vl.example import example
from tessera.models.qwen2_5_vl.flops import flops, work
from tessera.models.qwen2_5_vl.model import build
from tessera.models.qwen2_5_vl.plan import plan
from tessera.models.qwen2_5_vl.presets import PRESETS
from tessera.models.qwen2_5_vl.weights import weights


def _processor(config: Qwen25VLConfig, folder: Path, **options: Any) -> Processor:
    # Imported when first used: a model without its processor needs no tokenizer and no image library.
    from tessera.models.qwen2_5_vl.processor import Qwen25VLProcessor

    return Qwen25VLProcessor.load(config, folder, **options)


SPEC = ModelSpec(
    name="qwen2_5_vl",
    config=Qwen25VLConfig,
    build=build,
    plan=plan,
    weights=weights,
    processor=_processor,
    flops=flops,
    work=work,
    example=example,
    presets=PRESETS,
    task="language",
    hf_types=("qwen2_5_vl",),
)
