"""How a run that begins comes to its weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from tessera.checkpoint.examine import check_fit
from tessera.checkpoint.model_state import model_tensors, tied_names
from tessera.checkpoint.origin import fill_from, origin_of
from tessera.core.adapters import is_factor
from tessera.core.run_config import RunConfig
from tessera.parallel.apply import initialize, start_tensors
from tessera.tasks.lora import first_adapters, is_quantized, quantize_layers
from tessera.train.describe import Described


def check_first_weights(config: RunConfig, described: Described) -> None:
    """Before memory is taken for a model: whether the folder that it is to be filled from fits."""
    path, weights, lora = config.model.path, described.spec.weights, described.lora
    quantized = lora is not None and lora.quantize is not None  # those are read one by one, later
    if path is None or weights is None or quantized or origin_of(path) != "folder":
        return
    tensors = {name: tensor for name, tensor in model_tensors(described.module).items() if not is_factor(name)}
    check_fit(path, tensors, weights(described.config), tied=tied_names(described.module))


def first_weights(
    module: nn.Module, config: RunConfig, described: Described, device: torch.device
) -> Callable[[], None]:
    """Step 7 of a run that begins: from what the recipe names, otherwise from the seed."""
    weights, fresh = described.spec.weights, described.spec.fresh
    # Of the whole model: a stage of a pipeline is filled from the same files, and leaves the rest of them to others.
    adapters, lora, seed = described.adapters, described.lora, config.train.seed
    quantized = lora is not None and lora.quantize is not None
    tied = tied_names(described.module)
    names = _whole_names(described) if lora is not None else list(model_tensors(described.module))

    def from_path(tensors: Mapping[str, Tensor]) -> None:
        assert config.model.path is not None
        fill_from(config.model.path, tensors, None if weights is None else weights(described.config), tied, names)

    def from_seed(tensors: Mapping[str, Tensor]) -> None:
        start_tensors(module, tensors, seed, device)

    def fill() -> None:
        if config.model.path is None:
            make = None if fresh is None else functools.partial(fresh, described.config)
            initialize(module, seed, device, make)
        else:
            here = model_tensors(module).items()
            from_path({n: t for n, t in here if not is_factor(n) and not (quantized and is_quantized(n, adapters))})
        if quantized:
            quantize_layers(module, adapters, device, from_seed if config.model.path is None else from_path)
        if lora is not None:
            table = None if weights is None else weights(described.config)
            first_adapters(module, adapters, model_tensors(module), seed, device, lora.path, names, table)

    return fill


def _whole_names(described: Described) -> list[str]:
    """Of the model as files know it: without adapters, and with weights that are kept in four bits."""
    tensors = model_tensors(described.module)
    names = [name for name in tensors if not is_factor(name) and not is_quantized(name, described.adapters)]
    return list(dict.fromkeys([*names, *(f"{path}.weight" for path in described.adapters)]))
