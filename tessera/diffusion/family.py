"""Make the specification of a generation family from its parts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from tessera.core.batch import Batch
from tessera.core.model_plan import ModelPlan
from tessera.core.outputs import LATENTS
from tessera.core.spec import Component, ModelSpec, Processor
from tessera.diffusion.forms import GenerationForm
from tessera.models.text.hf import HFTextFormat
from tessera.weights.map import WeightMap

HFTextFormats = Mapping[str, tuple[HFTextFormat, str]]  # model_type -> format, class of transformers


def generation_processor(form: Callable[[Any], GenerationForm]) -> Callable[..., Processor]:
    """Return what makes the processor of a generation family, given what the family says of itself."""
    return functools.partial(_generation_processor, form)


def generation_family(
    name: str,
    config: type[Any],
    presets: Mapping[str, Mapping[str, Any]],
    *,
    build: Callable[[Any], nn.Module],
    plan: Callable[[Any], ModelPlan],
    weights: Callable[[Any], WeightMap],
    costs: tuple[Callable[..., float], Callable[..., dict[str, np.ndarray]]],
    example: Callable[[Any, int], Batch],
    other_weights: Mapping[str, Callable[[Any], WeightMap]] | None = None,
    originals: Mapping[str, Callable[[Path, Mapping[str, Any]], dict[str, Any]]] | None = None,
) -> ModelSpec:
    """Return the specification of a family that generates, from its parts. `config`: a configuration of diffusers with
    `generation`. `costs`: FLOPs of a batch, and of each sample. The rest is as in `vision_family`."""
    flops, work = costs
    return ModelSpec(
        name=name,
        config=config,
        main=Component(build, plan, {"hf": weights, **(other_weights or {})}),
        processor=generation_processor(config.generation),
        flops=flops,
        work=work,
        example=example,
        presets=presets,
        task="diffusion",
        outputs=(LATENTS,),
        hf_types=(config.class_name,),
        originals=originals or {},
        generation=config.generation,
    )


def _generation_processor(
    form: Callable[[Any], GenerationForm], config: Any, folder: Path | None, **options: Any
) -> Processor:
    # Imported when first used, as above.
    from tessera.diffusion.processor import GenerationProcessor

    return GenerationProcessor.load(form(config), None if folder is None else Path(folder), **options)
