"""Translate names of layers between this library, folders, files of adapters, and classes of transformers.

A weight map has rules for parameters. Adapters belong to modules, so here a module is the name of its weight without
the ending. "Canonical" is the spelling that the rules use; "in memory" is that of the classes of transformers, which
PEFT uses.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from tessera.errors import TesseraError
from tessera.weights.map import Operation, Stack, WeightMap

_WEIGHT = ".weight"


def layer_paths(parameters: Iterable[str]) -> list[str]:
    """Return the layers that parameters are the weights of."""
    return [name.removesuffix(_WEIGHT) for name in parameters if name.endswith(_WEIGHT)]


def modules_of(path: str, weight_map: WeightMap) -> tuple[Operation, list[str]] | None:
    """Return the modules, by canonical names, that make a native layer, and how; None where the map has no rule."""
    match = weight_map.rule_for(f"{path}{_WEIGHT}")
    return None if match is None else (match[0].op, [name.removesuffix(_WEIGHT) for name in match[1]])


def native_group(path: str, weight_map: WeightMap) -> list[str]:
    """Return the native layers that are one module together with this one, in order."""
    return [name.removesuffix(_WEIGHT) for name in weight_map.group_of(f"{path}{_WEIGHT}")]


def canonical(module: str, weight_map: WeightMap) -> str:
    """Return the name of a module in the spelling of the rules."""
    return weight_map.canonical(f"{module}{_WEIGHT}").removesuffix(_WEIGHT)


def in_memory(module: str, weight_map: WeightMap) -> str:
    """Return the name of a module, which is canonical, in the classes of transformers."""
    return weight_map.in_memory(f"{module}{_WEIGHT}").removesuffix(_WEIGHT)


def all_modules(parameters: Iterable[str], weight_map: WeightMap) -> set[str]:
    """Return the names in memory of all modules that parameters become."""
    rules = [modules_of(path, weight_map) for path in layer_paths(parameters)]
    return {in_memory(module, weight_map) for rule in rules if rule for module in rule[1]}


def experts_in_memory(path: str, weight_map: WeightMap, where: str) -> str:
    """Return the name of a module of experts in memory, where experts are stacked whatever the folder has."""
    match = weight_map.rule_for(f"{path}.down")
    if match is None:
        raise TesseraError(f"the weight map has no rule for {path}.down", where=where, code="model.no-weight-rule")
    rule, names = match
    # A folder has X.experts.down_proj, or a tensor for each expert: X.experts.0.down_proj.weight.
    return weight_map.in_memory(names[0]).rsplit(".", 3 if isinstance(rule.op, Stack) else 1)[0]


def parameters_in_memory(names: Collection[str], weight_map: WeightMap) -> dict[str, tuple[str, ...]]:
    """Return the names in memory of parameters that were trained in full, which PEFT stores beside adapters."""
    renamed: dict[str, tuple[str, ...]] = {}
    for name in names:
        match = weight_map.rule_for(name)
        if match is None:
            raise TesseraError(
                f"the weight map has no rule for {name}",
                where="model.lora.modules_to_save",
                code="model.no-weight-rule",
            )
        renamed[name] = tuple(weight_map.in_memory(foreign) for foreign in match[1])
    return renamed
