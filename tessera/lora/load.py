"""Load adapters from files, runs and checkpoints into a model of any layout, or merge them into its weights."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from tessera.checkpoint.files import box_slices
from tessera.checkpoint.manager import load_checkpoint
from tessera.checkpoint.state import MODEL
from tessera.checkpoint.weights import TensorSource, fill
from tessera.config import saved_recipe
from tessera.config.run_config import LoraSection, load_config
from tessera.core.model_plan import ModelPlan
from tessera.errors import TesseraError, few_names
from tessera.lora.exchange import FIRST, SECOND, is_adapters, match_names, open_adapters, read_saved
from tessera.lora.experts import take_experts
from tessera.lora.factors import (
    Factors,
    check_operation,
    check_shapes,
    join_to_native,
    layer_paths,
    merge_factors,
    modules_of,
    plain_form,
)
from tessera.lora.modules import find_adapters
from tessera.lora.peft import CONFIG, is_adapter_folder
from tessera.lora.select import (
    Adapters,
    expert_paths,
    factor_names,
    magnitude_name,
    spelled_out,
    tensor_names,
    tensor_shapes,
    weight_names,
)
from tessera.runtime.collective import Ranks
from tessera.weights.map import WeightMap
from tessera.weights.operations import Identity


def part_of(model: Path | None) -> str:
    """Return the expert of a video pipeline that a model folder contains, as its prefix in adapter files."""
    return SECOND if model is not None and model.name == SECOND else FIRST


def settled(
    section: LoraSection, parameters: Iterable[str], weight_map: WeightMap | None, part: str = FIRST
) -> LoraSection:
    """Fill in targets, rank, alpha and options from the adapters that a recipe starts from (`model.lora.path`).

    Return the section unchanged if it has no path, or lists targets. `parameters`: names of all parameters of the
    model. `part`: see `part_of`.
    """
    path, parameters = section.path, list(parameters)
    if path is None or section.targets:
        return section
    if is_adapters(path):
        read = read_adapters(path, parameters, weight_map, part)
        adapters = {layer: factors.adapter for layer, factors in read.items()}
        first = next(iter(adapters.values()))
        update = {"rank": first.rank, "alpha": first.alpha, "rslora": first.rslora, "dora": first.dora}
        saved = list(read_saved(path, parameters, weight_map))
        return spelled_out(section.model_copy(update={**update, "modules_to_save": saved}), adapters)
    if (path / "config.yaml").is_file():
        trained = load_config(saved_recipe.read_saved(path / "config.yaml")).model.lora
        if trained is not None:
            options = {"path": path, "dropout": section.dropout, "merge": section.merge, "forms": section.forms}
            return trained.model_copy(update=options)
    raise TesseraError(
        f"no adapters at {path}",
        where="model.lora.path",
        allowed=["a PEFT folder", "a LoRA file (.safetensors)", "a run or checkpoint that trained adapters"],
        code="adapter.not-here",
    )


def targets_origin(section: LoraSection) -> str | None:
    """Return the file that adapter targets come from; None without `model.lora.path`, or if a recipe has targets."""
    path = section.path
    if path is None or section.targets:
        return None
    if is_adapter_folder(path):
        return f"{path / CONFIG}, target_modules"
    return str(path) if is_adapters(path) else f"{path / 'config.yaml'}, model.lora.targets"


def fill_adapters(
    path: Path,
    tensors: Mapping[str, Tensor],
    adapters: Adapters,
    parameters: Iterable[str],
    weight_map: WeightMap | None,
    part: str = FIRST,
    saved: Collection[str] = (),
) -> None:
    """Fill the matrices of adapters, plain or sharded, from a file, a PEFT folder, a run or a checkpoint.

    Fully trained parameters are filled, too: those in the folder, or `saved` from a run. `tensors` may belong to one
    pipeline stage; `adapters` and `parameters` (all parameter names) cover all stages. A file must contain exactly
    `adapters`; `weight_map` translates its names.
    """
    parameters = list(parameters)
    full = read_saved(path, parameters, weight_map)
    wanted = {name for layer, adapter in adapters.items() for name in tensor_names(layer, adapter)}
    wanted.update(full if is_adapters(path) else saved)
    here = {name: tensor for name, tensor in tensors.items() if name in wanted}
    if not is_adapters(path):
        load_checkpoint(path, {f"{MODEL}{name}": tensor for name, tensor in here.items()})
        return
    Ranks.current().on_all(lambda: _fill(path, here, adapters, read_adapters(path, parameters, weight_map, part), full))


def _fill(
    where: Path,
    tensors: Mapping[str, Tensor],
    adapters: Adapters,
    stored: Mapping[str, Factors],
    saved: Mapping[str, Tensor],
) -> None:
    if differing := [path for path in (*adapters, *stored) if path not in adapters or path not in stored]:
        raise TesseraError(
            f"the recipe and the folder have adapters for different layers: {few_names(differing, 5)}",
            where=str(where),
            fix="leave out model.lora.targets: the folder states its layers",
            code="adapter.layers-differ",
        )
    full = dict(saved)
    for path, factors in stored.items():
        there, here = factors.adapter, adapters[path]
        if there.dora != here.dora or not math.isclose(there.scale, here.scale):
            raise TesseraError(
                f"{path}: the folder scales by {there.scale:g} with dora={there.dora}, the recipe by {here.scale:g} "
                f"with dora={here.dora}",
                where="model.lora",
                fix="leave out model.lora.targets, rank, alpha and dora: the folder states them",
                code="adapter.settings-differ",
            )
        a, b = factor_names(path)
        if a in tensors and b in tensors:
            check_shapes(
                path, factors, (*tensors[a].shape[:-2], tensors[b].shape[-2], tensors[a].shape[-1]), str(where)
            )
        full |= {a: factors.a, b: factors.b}
        if factors.m is not None:
            full[magnitude_name(path)] = factors.m
    shapes = {name: tuple(tensor.shape) for name, tensor in full.items()}

    def read(name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        return full[name][box_slices(offsets, sizes)]

    for name, target in tensors.items():
        fill(target, TensorSource(name, (name,), Identity()), shapes, read, str(where))


def merge_into(
    path: Path,
    strength: float,
    tensors: Mapping[str, Tensor],
    parameters: Iterable[str],
    weight_map: WeightMap | None,
    part: str = FIRST,
) -> None:
    """Merge the adapters of a file or folder, multiplied by `strength`, into the weights of a model.

    `tensors` may be sharded and belong to one pipeline stage. `parameters`: names of all parameters of the model.
    """
    if not math.isfinite(strength):
        raise TesseraError(
            f"the strength of adapters is {strength}, which is not a finite number",
            where=str(path),
            allowed=["a finite number; 1 is the trained strength"],
            code="adapter.bad-strength",
        )
    merge_factors(read_adapters(path, parameters, weight_map, part), tensors, strength, str(path))


def read_adapters(
    path: Path, parameters: Iterable[str], weight_map: WeightMap | None, part: str = FIRST
) -> dict[str, Factors]:
    """Read all adapters of a file or a PEFT folder and return them by the paths of native layers.

    `parameters`: names of all parameters of the model. `part`: see `part_of`. Raise if the file has an adapter of a
    layer that the model lacks. Leave out adapters of layers that the forward pass does not use (`WeightMap.idle`).
    """
    if weight_map is None:
        raise TesseraError(
            "this family has no weight map, so adapters cannot be read", where=str(path), code="adapter.no-weight-map"
        )
    parameters = list(parameters)
    paths, experts = layer_paths(parameters), expert_paths(parameters)
    stored = open_adapters(path, part)
    stacked: dict[str, Factors] = {}
    if experts:
        stacked, stored = take_experts(stored, experts, weight_map)
        if not stored.sides:
            return stacked
    table, names = match_names(stored, paths, weight_map)
    foreign = stored.factors(names, table)
    idle = {*weight_map.idle, *table.idle}
    adapters: dict[str, Factors] = {}
    for layer in paths:
        match = modules_of(layer, table)
        members = [] if match is None or layer in idle else [foreign.get(name) for name in match[1]]
        if match is not None and any(members):
            check_operation(match[0], layer, stored.where)
            adapters[layer] = join_to_native(match[0], members)
    if not adapters and not stacked:
        raise TesseraError("no adapters in this file", where=stored.where, code="adapter.none-in-file")
    return {**adapters, **stacked}


def read_all(
    path: Path,
    module: nn.Module,
    shapes: Mapping[str, Sequence[int]],
    plan: ModelPlan,
    weight_map: WeightMap | None,
) -> dict[str, Factors]:
    """Read the adapters of a PEFT folder, a LoRA file, a run or a checkpoint for a loaded model without adapters.

    Raise if other parameters were trained in full in addition to them, because these are not adapters. `module`: the
    model as its family builds it. `shapes`: of all tensors of the model, unsharded. All ranks call this together.
    """
    if is_adapters(path):
        _refuse_saved(list(read_saved(path, list(shapes), weight_map)), path)
        return read_adapters(path, shapes, weight_map)
    section = settled(LoraSection(path=path), shapes, weight_map)
    _refuse_saved(section.modules_to_save, path)
    adapters = find_adapters(section, module, plan, f"{path / 'config.yaml'}, model.lora.targets")
    stored: dict[str, Tensor] = {}
    for layer, adapter in adapters.items():
        sizes = tensor_shapes(layer, adapter, shapes[weight_names(layer, adapter)[0]])
        stored |= {name: torch.empty(size) for name, size in sizes.items()}
    load_checkpoint(path, {f"{MODEL}{name}": tensor for name, tensor in stored.items()})
    matrices, plain = plain_form(stored, adapters)
    read: dict[str, Factors] = {}
    for layer, adapter in plain.items():
        a, b = factor_names(layer)
        read[layer] = Factors(adapter, matrices[a], matrices[b], matrices.get(magnitude_name(layer)))
    return read


def _refuse_saved(names: Sequence[str], path: Path) -> None:
    if names:
        raise TesseraError(
            f"{few_names(names, 3)} were trained in full in addition to these adapters, and a server cannot change "
            "them per request",
            where=str(path),
            fix="merge them into a model: tessera convert ADAPTERS MERGED --like MODEL",
            code="adapter.saved-per-request",
        )
