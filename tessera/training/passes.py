"""Count the matrix products of a training step: frozen weights need fewer of them than trained weights."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import nn

from tessera.config.pattern import home, matches
from tessera.core.model_plan import ModelPlan
from tessera.core.spec import Passes, Training
from tessera.lora.select import is_factor
from tessera.runtime.modules import StackedExperts


@dataclass
class _Part:
    """Count the weights of matrix products in one part of a model. Only `top_k` of the experts are counted."""

    weights: float = 0.0
    trained: float = 0.0
    reached: float = 0.0  # number of weights in units that gradients pass through
    adapters: float = 0.0
    units: int = 0
    units_reached: int = 0
    first_trained: bool | None = None


def training_of(module: nn.Module, plan: ModelPlan, trained: Collection[str]) -> Training:
    """Return for each part of an unsharded model how often a step computes its matrix products (3 if fully trained).

    `trained`: names of the trained parameters. Gradients pass through a unit, such as a layer, if it or an earlier unit
    has a trained parameter. A family without pipeline units gets an empty result, and counts as fully trained.
    """
    trained = frozenset(trained)
    parts: dict[str, _Part] = {}
    trained_before = False
    paths = [path for path, _ in module.named_modules() if path]
    inner = [stream.module for stream in plan.sequences.values()]
    for path in (path for unit in plan.units for path in paths if matches(unit.pattern, path)):
        unit = module.get_submodule(path)
        part = parts.setdefault(_part_of(path, inner), _Part())
        here = {name for name, _ in unit.named_parameters() if f"{path}.{name}" in trained}
        weights, learned, adapters = _weights(unit, here)
        trained_before = trained_before or bool(here)
        if isinstance(unit, nn.Embedding):
            continue  # an embedding makes no matrix product
        part.weights += weights
        part.trained += learned
        part.adapters += adapters
        part.units += 1
        if part.first_trained is None:
            part.first_trained = learned > 0
        if trained_before:
            part.reached += weights
            part.units_reached += 1
    return {name: _passes(part) for name, part in parts.items() if part.weights}


def _part_of(path: str, inner: Sequence[str]) -> str:
    """Return the part of the model that a module belongs to. `inner`: modules that have parts themselves."""
    outer = home(path, inner)
    before = "" if outer is None else f"{outer}."
    return before + path.removeprefix(before).partition(".")[0]


def _passes(part: _Part) -> Passes:
    return Passes(
        weights=1 + (part.reached + part.trained + 3 * part.adapters) / part.weights,
        attention=1 + 2 * part.units_reached / part.units,
        first=2.0 if part.first_trained else 1.0,
    )


def _weights(unit: nn.Module, here: Collection[str]) -> tuple[float, float, float]:
    """Count the weights in a unit's matrix products: return (all, those trained, those of adapters).

    `here`: names of trained parameters in the unit.
    """
    weights = trained = adapters = 0.0
    # A token passes through `top_k` of the stacked experts and of their adapters.
    chosen = {path: part.top_k for path, part in unit.named_modules() if isinstance(part, StackedExperts)}
    for path, part in unit.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(part, nn.Linear):  # use the layer's sizes: a quantized weight is no parameter of this shape
            size = float(part.in_features * part.out_features)
            weights += size
            trained += size if f"{prefix}weight" in here else 0.0
            continue
        experts = home(path, chosen)
        for name, parameter in part.named_parameters(recurse=False):
            if parameter.dim() < 2:
                continue
            share = 1.0
            if parameter.dim() > 2 and experts is not None:
                share = chosen[experts] / parameter.shape[0]
            if is_factor(f".{path}.{name}"):
                adapters += share * parameter.numel()
                continue
            weights += share * parameter.numel()
            trained += share * parameter.numel() if prefix + name in here else 0.0
    return weights, trained, adapters
