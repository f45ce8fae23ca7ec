"""Read the adapters of a run, a checkpoint, a PEFT folder or a LoRA file, without the weights of their model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tessera.checkpoint.state import model_tensors
from tessera.config.trust import Trust
from tessera.core.spec import ModelSpec
from tessera.errors import TesseraError
from tessera.inference.load import find_model
from tessera.inference.weight_source import find_file
from tessera.lora.files import is_adapters, open_adapters
from tessera.lora.modules import find_adapters, trained_whole
from tessera.lora.reading import fill_adapters, part_of, settled, targets_origin
from tessera.lora.select import Adapters, factor_names, factor_shapes, magnitude_name, start_names, weight_names
from tessera.models import build_on_meta, for_family, resolve
from tessera.weights.map import WeightMap


@dataclass(frozen=True)
class LoadedAdapters:
    """Hold adapters with their matrices. The model's own weights are on the meta device."""

    spec: ModelSpec
    weight_map: WeightMap | None
    adapters: Adapters
    tensors: Mapping[str, Tensor]
    base: Path | None  # the folder of the model that they belong to
    saved: Sequence[str] = ()  # parameters that were trained whole beside them


def load_adapters(source: Path, base: Path | None, dtype: str | None, trust: Trust = False) -> LoadedAdapters:
    """Return the adapters at a path. `base`: the folder of their model, where a file does not name it. `dtype` None: as
    stored."""
    named = is_adapters(source)
    if base is not None and not named:
        raise TesseraError("a run says itself which model it is of", where="--like", fix="leave it out")
    found = find_model(source, dtype, trust, base)
    if found.section.lora is None:
        raise TesseraError("this model has no adapters", where=str(source), fix="leave --adapters out")
    spec, config = resolve(found.section)
    module = build_on_meta(spec, config)
    weights, part = spec.main.weight_map(config), part_of(found.section.path)
    tensors = dict(model_tensors(module))
    parameters = list(tensors)
    with for_family(spec):
        lora = settled(found.section.lora, parameters, weights, part)
        adapters = find_adapters(lora, module, spec.main.plan(config), targets_origin(found.section.lora))
        saved = trained_whole(lora, module, adapters)
    kind = found.dtype if dtype is not None or not named else _stored_type(source, part)
    tensors |= {name: torch.empty(tensors[name].shape, dtype=kind) for name in saved}
    for path, adapter in adapters.items():
        weight = tensors[weight_names(path, adapter)[0]].shape
        sizes_a, sizes_b = factor_shapes(adapter, weight)
        shapes: dict[str, tuple[int, ...]] = dict(zip(factor_names(path), (sizes_a, sizes_b), strict=True))
        if adapter.dora:
            shapes[magnitude_name(path)] = (weight[0],)
        if adapter.pissa:
            shapes |= dict(zip(start_names(path), (sizes_a, sizes_b), strict=True))
        tensors |= {name: torch.empty(shape, dtype=kind) for name, shape in shapes.items()}
    where = source if named or found.origin == "checkpoint" else find_file(source, "checkpoints").parent
    fill_adapters(where, tensors, adapters, parameters, weights, part, saved)
    return LoadedAdapters(spec, weights, adapters, tensors, found.section.path, saved)


def _stored_type(source: Path, part: str) -> torch.dtype:
    """Return the type of the matrices in a file."""
    sides = next(iter(open_adapters(source, part).sides.values()))
    return next(iter(sides.values())).dtype
