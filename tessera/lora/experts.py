"""Translate adapters of stacked experts to and from PEFT's files.

PEFT adapts a stacked parameter (`target_parameters`) by a wrapper around its module, so keys name the module:
`experts.lora_A.weight`. If both parameters are adapted, the module has two wrappers, and gate_up_proj belongs to the
inner wrapper: `experts.base_layer.lora_A.weight`. PEFT stores 2D matrices: A [experts x rank, in] with experts as the
outer index, and B [out, rank x experts] with experts as the inner index.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tessera.errors import TesseraError, few_names
from tessera.lora.exchange import StoredAdapters, damaged, matrices
from tessera.lora.factors import Factors, experts_in_memory
from tessera.lora.peft import ranks_and_alphas, target_parameters
from tessera.runtime.modules import EXPERT_WEIGHTS
from tessera.weights.map import WeightMap

INNER = "base_layer"  # PEFT's name of the module inside a wrapper


def to_peft(native: Mapping[str, Factors], weight_map: WeightMap, where: str) -> dict[str, Factors]:
    """Return adapters of experts as PEFT's 2D matrices, by parameter names of transformers."""
    flat: dict[str, Factors] = {}
    for path, factors in native.items():
        home, _, name = path.rpartition(".")
        a = factors.a.flatten(0, 1)
        b = factors.b.flatten(1, 2).permute(1, 2, 0).flatten(1)
        flat[f"{experts_in_memory(home, weight_map, where)}.{name}"] = Factors(factors.adapter, a, b)
    return flat


def wrapper_names(parameters: Mapping[str, Factors]) -> dict[str, str]:
    """Return parameter -> path of its PEFT wrapper. Wrappers of several parameters of one module are nested."""
    order, wrappers = list(EXPERT_WEIGHTS), dict[str, str]()
    for parameter in parameters:
        home, _, name = parameter.rpartition(".")
        around = [other for other in order[order.index(name) + 1 :] if f"{home}.{other}" in parameters]
        wrappers[parameter] = ".".join([home, *([INNER] * len(around))])
    return wrappers


def take_experts(
    stored: StoredAdapters, experts: Mapping[str, tuple[str, ...]], weight_map: WeightMap
) -> tuple[dict[str, Factors], StoredAdapters]:
    """Split stored adapters: return the adapters of experts, by path in Tessera's model, and all other adapters.

    `experts`: path of a possible expert adapter -> the weights that it adapts; see `expert_paths`.
    """
    homes = list(dict.fromkeys(path.rpartition(".")[0] for path in experts))
    modules = {weight_map.canonical(experts_in_memory(home, weight_map, stored.where)): home for home in homes}
    wrapped: dict[str, dict[int, str]] = {}  # native module -> nesting depth of the wrapper -> layer name in the file
    for layer in stored.sides:
        outside = layer
        while outside.endswith(f".{INNER}"):
            outside = outside.removesuffix(f".{INNER}")
        if (home := modules.get(weight_map.canonical(outside))) is not None:
            wrapped.setdefault(home, {})[(len(layer) - len(outside)) // (len(INNER) + 1)] = layer
    if wrapped and (stored.config or {}).get("use_dora"):
        raise TesseraError(
            "use_dora is not supported for experts",
            where=stored.config_where,
            allowed=[False],
            code="adapter.experts-dora",
        )
    adapters: dict[str, Factors] = {}
    for home, layers in wrapped.items():
        adapters |= _from_wrappers(home, layers, stored, weight_map)
    taken = {layer for layers in wrapped.values() for layer in layers.values()}
    others = {layer: sides for layer, sides in stored.sides.items() if layer not in taken}
    return {path: adapters[path] for path in experts if path in adapters}, replace(stored, sides=others)


def _from_wrappers(
    home: str, layers: Mapping[int, str], stored: StoredAdapters, weight_map: WeightMap
) -> dict[str, Factors]:
    """Return the adapters of one module of experts. `layers`: layer names in the file by nesting depth."""
    there = experts_in_memory(home, weight_map, stored.where)
    targets = target_parameters(stored.config or {}, stored.config_where)
    # PEFT compares the end of a parameter's name, after a dot, with each target.
    named = [name for name in EXPERT_WEIGHTS if any(f".{there}.{name}".endswith(f".{end}") for end in targets)]
    if sorted(layers) != list(range(len(named))):
        matched = few_names(named, 2) if named else "none of its parameters"
        what = f"the file has {len(layers)} adapters for {there}, and target_parameters names {matched}"
        raise damaged(stored.config_where, what)
    adapters: dict[str, Factors] = {}
    for depth, name in enumerate(reversed(named)):
        layer, parameter, weights = layers[depth], f"{there}.{name}", EXPERT_WEIGHTS[name]
        a, b = matrices(layer, stored.sides[layer], stored.where)
        stated = ranks_and_alphas(stored.config or {}, {parameter}, stored.config_where)[parameter]
        rank = int(stated[0])
        if rank != stated[0] or a.shape[0] % rank or b.shape[0] % len(weights):
            shapes = f"{list(a.shape)} and {list(b.shape)}"
            what = f"{parameter}: the configuration states rank {stated[0]:g}, the weights have shapes {shapes}"
            raise damaged(stored.config_where, what)
        adapter = replace(stored.adapter(layer, parameter, rank, stated), stacked=weights)
        count = a.shape[0] // rank
        of_experts = b.view(b.shape[0], rank, count).permute(2, 0, 1)
        by_weight = of_experts.reshape(count, len(weights), -1, rank)
        adapters[f"{home}.{name}"] = Factors(adapter, a.view(count, rank, -1), by_weight)
    return adapters
