"""Qwen2-VL: pictures and clips of any size, read among the words with positions in time, height and width."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tessera.core.types import ModelSpec, Processor
from tessera.models.qwen2_vl.config import Qwen2VLConfig
from tessera.models.qwen2_vl.example import example
from tessera.models.qwen2_vl.flops import flops, work
from tessera.models.qwen2_vl.model import build
from tessera.models.qwen2_vl.plan import plan
from tessera.models.qwen2_vl.presets import PRESETS
from tessera.models.qwen2_vl.weights import weights


def _processor(config: Qwen2VLConfig, folder: Path, **options: Any) -> Processor:
    # Imported when first used: a model without its processor needs no tokenizer and no image library.
    from tessera.models.qwen2_vl.processor import Qwen2VLProcessor

    return Qwen2VLProcessor.load(config, folder, **options)


SPEC = ModelSpec(
    name="qwen2_vl",
    config=Qwen2VLConfig,
    build=build,
    plan=plan,
    weights=weights,
    processor=_processor,
    flops=flops,
    work=work,
    example=example,
    presets=PRESETS,
    task="language",
    hf_types=("qwen2_vl",),
)
