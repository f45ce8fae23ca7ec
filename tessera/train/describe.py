"""What a recipe describes, before anything has weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from tessera.checkpoint.examine import check_numbers
from tessera.core.adapters import Adapters
from tessera.core.errors import TesseraError
from tessera.core.run_config import LoraSection, RunConfig
from tessera.core.types import ModelSpec, Training
from tessera.models import build_on_meta, read_folder_config, resolve
from tessera.parallel.passes import training_of
from tessera.parallel.plan import Plan, Workload, make_plan
from tessera.tasks.lora import adapt


@dataclass(frozen=True)
class Described:
    """A model as the recipe describes it, on the meta device: enough for a plan, no byte of weights."""

    spec: ModelSpec
    config: Any
    module: nn.Module
    plan: Plan
    lora: LoraSection | None = None  # with every target named
    adapters: Adapters = field(default_factory=dict)

    @cached_property
    def training(self) -> Training:
        """How much of the model's products a step computes, given what is frozen. Asked before it is dealt out."""
        trained = [piece.name for piece in self.plan.pieces if piece.trained]
        return training_of(self.module, self.spec.plan(self.config), trained)


def describe(config: RunConfig, world_size: int) -> Described:
    """Steps 2, 3 and 5 of a run; needs no process group and no accelerator."""
    path = config.model.path
    if path is not None and (path / "config.json").is_file() and not (path / "config.yaml").is_file():
        check_numbers(read_folder_config(path), path)
    spec, model_config = resolve(config.model)
    module = build_on_meta(spec, model_config)
    model_plan, lora = spec.plan(model_config), config.model.lora
    adapters: Adapters = {}
    if lora is not None:
        _check_layout(config)
        table = None if spec.weights is None else spec.weights(model_config)
        lora, adapters, model_plan = adapt(lora, module, model_plan, table)
    plan = make_plan(
        config.parallel,
        model_plan,
        module,
        world_size,
        storage_dtype=config.model.dtype,
        freeze=config.model.freeze,
        workload=_workload(config, spec, model_config),
    )
    return Described(spec, model_config, module, plan, lora, adapters)


def _check_layout(config: RunConfig) -> None:
    lora = config.model.lora
    if lora is not None and lora.quantize is not None and config.parallel.tp > 1:
        raise TesseraError(
            f"weights in four bits are whole on every rank, and parallel.tp={config.parallel.tp} would cut them",
            where="model.lora.quantize",
            fix="parallel.tp=1: with four bits a layer is small, and data ranks or a pipeline share the work",
        )


def _workload(config: RunConfig, spec: ModelSpec, model_config: Any) -> Workload:
    tokens, patches = config.data.length * config.train.micro_batch, 0
    if spec.example is not None:
        with torch.device("meta"):
            typical = spec.example(model_config, tokens).get("pixels")
        patches = 0 if typical is None else typical.shape[0]
    return Workload(tokens, patches, config.train.global_batch, config.train.micro_batch)


def with_model_resolved(config: RunConfig, described: Described) -> RunConfig:
    """The recipe as a run keeps it: with every field of the model, so that presets and folders may change or go."""
    full: dict[str, Any] = {"family": config.model.family or described.spec.name, "preset": None}
    full["config"] = described.config.model_dump(mode="json")
    full["lora"] = described.lora
    return config.model_copy(update={"model": config.model.model_copy(update=full)})
