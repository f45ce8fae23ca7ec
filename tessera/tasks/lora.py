"""LoRA in a run: the model is changed before it is dealt out, and its adapters are filled beside its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from tessera.checkpoint.peft import fill_adapters, settled
from tessera.core.adapters import Adapters, is_factor, spelled_out
from tessera.core.run_config import LoraSection
from tessera.core.types import ModelPlan
from tessera.core.weightmap import WeightMap
from tessera.nn.lora import (
    PACKED,
    SCALES,
    QuantizedLoraLinear,
    adapted_layers,
    add_adapters,
    find_adapters,
    start_factor,
    with_adapters,
)
from tessera.parallel.apply import start_parameters


def adapt(
    section: LoraSection, module: nn.Module, plan: ModelPlan, weight_map: WeightMap | None
) -> tuple[LoraSection, Adapters, ModelPlan]:
    """Changes a module on the meta device. Gives the section with every target named, and the model's plan with the
    adapters in it."""
    section = settled(section, [name for name, _ in module.named_parameters()], weight_map)
    adapters = find_adapters(section, module, plan)
    add_adapters(module, adapters, section.dropout, section.quantize is not None)
    return spelled_out(section, adapters), adapters, with_adapters(plan)


def first_adapters(
    module: nn.Module,
    adapters: Adapters,
    tensors: Mapping[str, Tensor],
    seed: int,
    device: torch.device,
    path: Path | None = None,
    parameters: list[str] | None = None,
    weight_map: WeightMap | None = None,
) -> None:
    """As the recipe says: from `path`, otherwise from the seed, so that the model begins as it was. `parameters`: names
    of the whole model's, when `module` is a part of it."""
    start_parameters(module, start_factor, seed, device, is_factor)
    if path is not None:
        fill_adapters(path, tensors, adapters, parameters or [], weight_map)


def quantize_layers(
    module: nn.Module, adapters: Adapters, device: torch.device, fill: Callable[[Mapping[str, Tensor]], None]
) -> None:
    """Fills the layers that are kept in four bits, one after another: `fill` gives whole weights by name. All ranks do
    this for all layers, those of other stages with nothing to fill: reading is done together."""
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


def is_quantized(name: str, adapters: Adapters) -> bool:
    """Whether a tensor of the model is a part of a weight in four bits, which no file but our own checkpoints holds."""
    path, _, kind = name.rpartition(".")
    return kind in (PACKED, SCALES) and path in adapters
