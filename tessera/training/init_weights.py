"""Fill a model with its initial weights: from the folder that the recipe names, otherwise from the seed.

Adapters are filled, too. Quantized layers are filled one after another.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from tessera.checkpoint.forms import NativeTensors, check_folder_fit, fill_tensors, native_shapes
from tessera.checkpoint.frozen import FrozenSource
from tessera.checkpoint.legacy.forms import open_form
from tessera.checkpoint.state import model_tensors, tied_names
from tessera.config.run_config import RunConfig
from tessera.core.spec import InitializesByName
from tessera.inference.weight_source import fill_from, origin_of
from tessera.lora.load import fill_adapters, part_of
from tessera.lora.modules import PACKED, SCALES, QuantizedLoraLinear, adapted_layers, start_factor
from tessera.lora.select import Adapters, is_factor, weight_names
from tessera.models import fresh_names
from tessera.parallel.apply import initialize, start_parameters, start_tensors
from tessera.training.adapter_start import start_from_weights
from tessera.training.setup import ModelSetup


def check_first_weights(config: RunConfig, setup: ModelSetup) -> None:
    """Raise if the tensors of the weight folder do not fit the model, before memory is allocated."""
    path, weight_map = config.model.path, setup.spec.main.weight_map(setup.config)
    if config.model.weights is not None and weight_map is not None:
        shapes = _file_shapes(setup)
        with open_form(config.model.weights, setup.spec.name, setup.config, weight_map, shapes) as stored:
            NativeTensors(stored, weight_map, shapes, tied_names(setup.module))
        return
    # Weights of quantized layers are checked later, when they are read one by one.
    if path is None or weight_map is None or _quantizes(setup) or origin_of(path) != "folder":
        return
    fresh = fresh_names(config.model, setup.spec)
    tensors = {n: t for n, t in model_tensors(setup.module).items() if not is_factor(n) and n not in fresh}
    check_folder_fit(path, tensors, weight_map, tied=tied_names(setup.module))


def initial_weights(
    module: nn.Module, config: RunConfig, setup: ModelSetup, device: torch.device
) -> Callable[[], None]:
    """Return a function that fills this rank's part of the model with the initial weights of a new run."""
    # Names of the full model, of which a pipeline stage has some: weight files must match the full model.
    adapters, lora, seed = setup.adapters, setup.lora, config.train.seed
    fresh = fresh_names(config.model, setup.spec)
    names = [name for name in _names_in_files(setup) if name not in fresh]
    from_path = _folder_reader(config, setup, names)

    def from_seed(tensors: Mapping[str, Tensor]) -> None:
        start_tensors(module, tensors, seed, device)

    def fill() -> None:
        if config.model.path is None:
            _fill_from_seed(module, config, setup, device)
        else:
            here = model_tensors(module).items()
            from_path({n: t for n, t in here if not is_factor(n) and not _is_quantized(n, adapters) and n not in fresh})
            if fresh:
                assert isinstance(module, InitializesByName), "a model with a new head draws weights by name"
                start_parameters(module, module.initialize, seed, device, fresh.__contains__)
        if _quantizes(setup):
            _quantize_layers(module, adapters, device, from_seed if config.model.path is None else from_path)
        if lora is not None:  # initialize adapters so that they do not change the outputs of the model
            start_parameters(module, start_factor, seed, device, is_factor)
            start_from_weights(module)
        if lora is not None and lora.path is not None:
            weight_map = setup.spec.main.weight_map(setup.config)
            part = part_of(config.model.path)
            saved = [shard.name for shard in setup.plan.param_shards if shard.trained and not is_factor(shard.name)]
            fill_adapters(lora.path, model_tensors(module), adapters, [*names, *fresh], weight_map, part, saved)

    return fill


def frozen_source(config: RunConfig, setup: ModelSetup) -> FrozenSource:
    """Return the model folder, and the names of frozen parameters that checkpoints leave out.

    A resume reads these from the folder again. They are frozen parameters that came from the folder of a published
    model. Checkpoints store frozen parameters that were initialized from the seed, read from a run, or passed as an
    object. With `checkpoint.store_frozen`, they store all of them.
    """
    path, fresh = config.model.path, fresh_names(config.model, setup.spec)
    in_files = [name for name in _names_in_files(setup) if name not in fresh]
    adapted = {f"{layer}.weight" for layer in setup.adapters} if _quantizes(setup) else set()
    names: frozenset[str] = frozenset()
    published = path is not None and path.is_dir() and config.model.weights is None and origin_of(path) == "folder"
    if published and not config.checkpoint.store_frozen:
        frozen = {shard.name for shard in setup.plan.param_shards if not shard.trained}
        names = frozenset(frozen & set(in_files)) - adapted
    weight_map, tied = setup.spec.main.weight_map(setup.config), tied_names(setup.module)

    def read(folder: Path, tensors: Mapping[str, Tensor]) -> None:
        fill_from(folder, tensors, weight_map, tied, in_files)

    return FrozenSource(path, read, names)


def fill_copy(module: nn.Module, config: RunConfig, setup: ModelSetup, device: torch.device) -> None:
    """Fill a second copy of the model with the initial weights of the run.

    Checkpoints do not store it: a resumed run fills it again, from the same folder or seed.
    """
    if config.model.path is None:
        _fill_from_seed(module, config, setup, device)
    else:
        _folder_reader(config, setup, list(model_tensors(module)))(model_tensors(module))


def _fill_from_seed(module: nn.Module, config: RunConfig, setup: ModelSetup, device: torch.device) -> None:
    load = setup.spec.main.load
    initialize(module, config.train.seed, device, None if load is None else functools.partial(load, setup.config))


def _folder_reader(config: RunConfig, setup: ModelSetup, names: list[str]) -> Callable[[Mapping[str, Tensor]], None]:
    weight_map, tied = setup.spec.main.weight_map(setup.config), tied_names(setup.module)

    def read(tensors: Mapping[str, Tensor]) -> None:
        assert config.model.path is not None
        if config.model.weights is None:
            fill_from(config.model.path, tensors, weight_map, tied, names)
            return
        assert weight_map is not None, "a model with a folder has a weight map"
        form, shapes = (config.model.weights, setup.spec.name, setup.config, weight_map), _file_shapes(setup)
        fill_tensors(lambda: open_form(*form, shapes), tensors, weight_map, tied, shapes)

    return read


def _names_in_files(setup: ModelSetup) -> list[str]:
    """Return the names of the tensors that weight files contain: no adapters, and weights before quantization."""
    tensors = model_tensors(setup.module)
    names = [name for name in tensors if not is_factor(name) and not _is_quantized(name, setup.adapters)]
    adapted = (name for path, adapter in setup.adapters.items() for name in weight_names(path, adapter))
    return list(dict.fromkeys([*names, *adapted]))


def _file_shapes(setup: ModelSetup) -> dict[str, tuple[int, ...]]:
    """Return the shape in the model of each tensor that weight files contain.

    For a quantized layer it is the shape of the unquantized weight, because files contain that.
    """
    shapes = native_shapes(model_tensors(setup.module))
    for path, layer in adapted_layers(setup.module).items():
        if isinstance(layer, QuantizedLoraLinear):
            shapes[f"{path}.weight"] = (layer.out_features, layer.in_features)
    return {name: shapes[name] for name in _names_in_files(setup)}


def _quantizes(setup: ModelSetup) -> bool:
    return setup.lora is not None and setup.lora.quantize is not None


def _is_quantized(name: str, adapters: Adapters) -> bool:
    """Return whether a tensor stores a quantized weight. Weight files have the unquantized weight instead."""
    path, _, kind = name.rpartition(".")
    return kind in (PACKED, SCALES) and path in adapters


def _quantize_layers(
    module: nn.Module, adapters: Adapters, device: torch.device, fill: Callable[[Mapping[str, Tensor]], None]
) -> None:
    """Read the weights of quantized layers one by one, and quantize them. `fill` reads unquantized weights by name.

    All ranks call `fill` together: with no tensors for a layer of another pipeline stage.
    """
    here = adapted_layers(module)
    for path in adapters:
        layer = here.get(path)
        if layer is None:
            fill({})
            continue
        assert isinstance(layer, QuantizedLoraLinear)
        weight = torch.empty(layer.out_features, layer.in_features, device=device)
        fill({f"{path}.weight": weight})
        layer.keep(weight)
