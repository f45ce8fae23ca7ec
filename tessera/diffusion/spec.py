"""Build the specification of a generation family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from torch import nn

from tessera.core.batch import Batch
from tessera.core.model_plan import ModelPlan
from tessera.core.spec import Component, Processor, Training
from tessera.diffusion.family import GenerationFamily, GenerationSpec
from tessera.diffusion.processor import GenerationProcessor
from tessera.models.text.costs import Measures
from tessera.weights.map import WeightMap

Work = Callable[[Any, Measures, Training], np.ndarray]  # (config, measures, training) -> FLOPs of samples


def generation_processor(family: Callable[[Any], GenerationFamily]) -> Callable[..., Processor]:
    """Return the constructor of a family's processor."""
    return partial(_load_processor, family)


def generation_family(
    name: str,
    config: type[Any],
    presets: Mapping[str, Mapping[str, Any]],
    *,
    build: Callable[[Any], nn.Module],
    plan: Callable[[Any], ModelPlan],
    weights: Callable[[Any], WeightMap],
    work: Work,
    measures: Callable[[Batch], Measures],
    example: Callable[[Any, int], Batch],
    original: Callable[[Any], WeightMap] | None = None,
    originals: Mapping[str, Callable[[Path, Mapping[str, Any]], dict[str, Any]]] | None = None,
) -> GenerationSpec:
    """Return the specification of a family. `config`: a `DiffusersConfig` class. `weights`, `original`: parameter names
    in diffusers folders and in original checkpoints. `measures`: counts tokens. `work`: FLOPs from these counts."""
    forms = {"hf": weights} | ({} if original is None else {"original": original})
    return GenerationSpec(
        name=name,
        config=config,
        main=Component(build, plan, forms),
        processor=generation_processor(config.generation),
        flops=partial(_flops, work, measures),
        work=partial(_work, work),
        example=example,
        presets=presets,
        hf_types=(config.class_name,),
        originals=originals or {},
        generation=config.generation,
    )


def _load_processor(
    family: Callable[[Any], GenerationFamily], config: Any, folder: Path | None, **options: Any
) -> Processor:
    return GenerationProcessor.load(family(config), None if folder is None else Path(folder), **options)


def _flops(
    work: Work,
    measures: Callable[[Batch], Measures],
    config: Any,
    batch: Batch,
    training: Training = MappingProxyType({}),
) -> float:
    return float(work(config, measures(batch), training).sum())


def _work(
    work: Work, config: Any, measures: Measures, training: Training = MappingProxyType({})
) -> dict[str, np.ndarray]:
    return {"latents": work(config, measures, training)}
