"""Load the adapters of a run, a checkpoint, a PEFT folder or a LoRA file, without the weights of the base model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tessera.checkpoint.state import model_tensors
from tessera.config.trust import Trust
from tessera.core.spec import ModelSpec
from tessera.engine.adapter_bank import AdapterBank
from tessera.errors import TesseraError
from tessera.inference.found_model import find_model
from tessera.inference.load import chosen_adapters
from tessera.inference.loaded import LoadedModel
from tessera.inference.weight_source import with_checkpoints
from tessera.lora.exchange import is_adapters, open_adapters
from tessera.lora.load import fill_adapters, part_of
from tessera.lora.select import Adapters, tensor_shapes, weight_names
from tessera.models import build_on_meta, resolve
from tessera.weights.map import WeightMap


@dataclass(frozen=True)
class LoadedAdapters:
    """Hold adapters with their matrices. Weights of the base model are on the meta device."""

    spec: ModelSpec
    weight_map: WeightMap | None
    adapters: Adapters
    tensors: Mapping[str, Tensor]
    base: Path | None  # folder of the base model
    saved: Sequence[str] = ()  # names of parameters that were trained in full in addition to the adapters


def bank_of(model: LoadedModel, *, slots: int = 8, rank: int | None = None) -> AdapterBank:
    """Return a bank of adapters for requests to a loaded model. `slots`, `rank`: see `AdapterBank`."""
    main, built = model.spec.main, build_on_meta(model.spec, model.config)
    plan, weight_map = main.plan(model.config), main.weight_map(model.config)
    return AdapterBank(model.module, plan, weight_map, slots=slots, rank=rank, built=built)


def load_adapters(source: Path, base: Path | None, dtype: str | None, trust: Trust = False) -> LoadedAdapters:
    """Load the adapters at a path.

    `base`: folder of the base model, if the adapter file does not name it. `dtype` None: as stored.
    """
    in_file = is_adapters(source)
    if base is not None and not in_file:
        raise TesseraError(
            "a run contains the path of its base model",
            where="--like",
            fix="leave --like out",
            code="adapter.run-names-its-model",
        )
    model = find_model(source, dtype, trust, base)
    if model.section.lora is None:
        raise TesseraError(
            "the source has no adapters", where=str(source), fix="leave --adapters out", code="adapter.none-in-model"
        )
    spec, config = resolve(model.section)
    module = build_on_meta(spec, config)
    weights, part = spec.main.weight_map(config), part_of(model.section.path)
    tensors = dict(model_tensors(module))
    parameters = list(tensors)
    adapters, saved = chosen_adapters(model.section, spec, config, module)
    kind = model.dtype if dtype is not None or not in_file else _stored_type(source, part)
    shapes = {name: tuple(tensors[name].shape) for name in saved}
    for path, adapter in adapters.items():
        shapes |= tensor_shapes(path, adapter, tensors[weight_names(path, adapter)[0]].shape)
    tensors |= {name: torch.empty(shape, dtype=kind) for name, shape in shapes.items()}
    where = source if in_file else with_checkpoints(source)
    fill_adapters(where, tensors, adapters, parameters, weights, part, saved)
    return LoadedAdapters(spec, weights, adapters, tensors, model.section.path, saved)


def _stored_type(source: Path, part: str) -> torch.dtype:
    """Return the dtype of the matrices in an adapter file."""
    sides = next(iter(open_adapters(source, part).sides.values()))
    return next(iter(sides.values())).dtype
