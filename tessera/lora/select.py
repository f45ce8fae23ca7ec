"""Define adapters (LoRA): their names, ranks and scales, and which layers get one. W x becomes W x + scale B A x.

A layer `q` keeps its name and weight, and gets `q.lora_a.weight` [rank, in] and `q.lora_b.weight` [out, rank].

DoRA scales the rows of W + scale B A to trained norms, `q.lora_m.weight` [out]. With PiSSA, A and B start from singular
vectors of W; their initial values, `q.lora_a0.weight` and `q.lora_b0.weight`, are frozen and subtracted.

The weights of experts are stacked. Their adapter has two matrices per expert, and a path beside the weights: gate and
up share `experts.gate_up_proj.lora_a.weight` [experts, rank, in] and `experts.gate_up_proj.lora_b.weight` [experts, 2,
out, rank]. `experts.down_proj` has the same names for one weight.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from tessera.config.pattern import ancestors, matches, select_trees
from tessera.config.run_config import LoraSection, LoraTarget
from tessera.errors import TesseraError
from tessera.runtime.modules import EXPERT_WEIGHTS

A, B = "lora_a", "lora_b"
MAGNITUDE, START_A, START_B = "lora_m", "lora_a0", "lora_b0"
_TAILS = (f".{A}.weight", f".{B}.weight", f".{MAGNITUDE}.weight", f".{START_A}.weight", f".{START_B}.weight")


@dataclass(frozen=True)
class Adapter:
    """Describe the adapter of one layer."""

    rank: int
    alpha: float
    rslora: bool = False
    dora: bool = False
    pissa: bool = False
    stacked: tuple[str, ...] = ()  # for experts: names of the stacked weights that share this adapter

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


Adapters = Mapping[str, Adapter]  # path of a layer -> its adapter


def factor_names(path: str) -> tuple[str, str]:
    """Return the parameter names of matrices A and B of a layer's adapter."""
    return f"{path}{_TAILS[0]}", f"{path}{_TAILS[1]}"


def magnitude_name(path: str) -> str:
    """Return the parameter name of DoRA's row norms."""
    return f"{path}{_TAILS[2]}"


def start_names(path: str) -> tuple[str, str]:
    """Return the parameter names of PiSSA's initial matrices."""
    return f"{path}{_TAILS[3]}", f"{path}{_TAILS[4]}"


def tensor_names(path: str, adapter: Adapter) -> tuple[str, ...]:
    """Return the names of all parameters of a layer's adapter."""
    return (
        *factor_names(path),
        *((magnitude_name(path),) if adapter.dora else ()),
        *(start_names(path) if adapter.pissa else ()),
    )


def weight_names(path: str, adapter: Adapter) -> tuple[str, ...]:
    """Return the names of the weights that an adapter changes: one weight, or several of stacked experts."""
    home = path.rpartition(".")[0]
    return tuple(f"{home}.{name}" for name in adapter.stacked) or (f"{path}.weight",)


def adapter_for(weight: str, adapters: Adapters) -> tuple[str, int] | None:
    """Return the path of the adapter of a weight, and the weight's index in it; None if the weight has no adapter."""
    owner, _, kind = weight.rpartition(".")
    if kind == "weight" and owner in adapters:
        return owner, 0
    for name, weights in EXPERT_WEIGHTS.items():
        path = f"{owner}.{name}"
        if kind in weights and path in adapters and adapters[path].stacked:
            return path, weights.index(kind)
    return None


def factor_shapes(adapter: Adapter, weight: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of A and B. `weight`: the shape of the layer's weight, or of each stacked weight."""
    *experts, outputs, inputs = weight
    shared = [len(adapter.stacked)] if adapter.stacked else []
    return (*experts, adapter.rank, inputs), (*experts, *shared, outputs, adapter.rank)


def tensor_shapes(path: str, adapter: Adapter, weight: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all parameters of a layer's adapter by name. `weight`: the shape of the layer's weight."""
    factors = factor_shapes(adapter, weight)
    shapes = dict(zip(factor_names(path), factors, strict=True))
    if adapter.dora:
        shapes[magnitude_name(path)] = (weight[0],)
    return shapes | (dict(zip(start_names(path), factors, strict=True)) if adapter.pissa else {})


def expert_paths(parameters: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Return a mapping: path of a possible adapter of stacked experts -> names of the weights that it adapts."""
    names = set(parameters)
    owners = [name.removesuffix(".down") for name in parameters if name.endswith(".down")]
    needed = [weight for weights in EXPERT_WEIGHTS.values() for weight in weights]
    return {
        f"{owner}.{name}": weights
        for owner in owners
        if all(f"{owner}.{weight}" in names for weight in needed)
        for name, weights in EXPERT_WEIGHTS.items()
    }


def is_factor(name: str) -> bool:
    """Return whether a parameter belongs to an adapter."""
    return name.endswith(_TAILS)


def is_output_factor(name: str) -> bool:
    """Return whether a parameter is matrix B of an adapter."""
    return name.endswith(_TAILS[1])


def adapter_of(section: LoraSection) -> Adapter:
    """Return an adapter with the rank, alpha and options of `model.lora`. Settings of single targets are not used."""
    return Adapter(section.rank, section.alpha, section.rslora, section.dora, section.init == "pissa")


def choose(
    section: LoraSection,
    layers: Sequence[str],
    default: Sequence[str],
    refused: Mapping[str, str],
    experts: Mapping[str, tuple[str, ...]] | None = None,
    origin: str | None = None,
) -> dict[str, Adapter]:
    """Return the adapters that a recipe selects from `layers`. `default`: layers to adapt without `targets`.

    `refused`: paths that cannot have an adapter -> the reason. `experts`: possible adapters of stacked experts, which
    are selected only by patterns that name them. If several patterns match a layer, the last pattern wins. `origin`:
    the file that the targets come from; default: the recipe.
    """
    experts = experts or {}
    chosen: dict[str, Adapter] = {}
    for number, target in enumerate(section.targets):
        settings = target if isinstance(target, LoraTarget) else LoraTarget(modules=target)
        where = origin or f"model.lora.targets.{number}"
        rank, alpha = settings.rank or section.rank, settings.alpha or section.alpha
        adapter = replace(adapter_of(section), rank=rank, alpha=alpha)
        named = [path for path in experts if any(matches(settings.modules, above) for above in ancestors(path)[-2:])]
        chosen.update({path: replace(adapter, stacked=experts[path]) for path in named})
        if not any(matches(settings.modules, above) for path in layers for above in ancestors(path)):
            if named:
                continue
            _check_refused(settings.modules, refused, experts, where)
        fixes = {"fix": "load these adapters with the model and family that they were trained with"} if origin else {}
        selected = select_trees([settings.modules], [*layers, *experts], where, **fixes)
        chosen.update(dict.fromkeys((path for path in selected if path not in experts), adapter))
    if not section.targets:
        chosen = dict.fromkeys(default, adapter_of(section))
    if not chosen:
        raise TesseraError(
            "there is no layer to adapt: the decoder blocks of this model have no plain linear layer",
            where="model.lora.targets",
            fix="name linear layers in model.lora.targets",
            code="adapter.no-layer",
        )
    _check_experts(section, [path for path, adapter in chosen.items() if adapter.stacked])
    return {path: chosen[path] for path in [*layers, *experts] if path in chosen}


def _check_refused(
    pattern: str, refused: Mapping[str, str], experts: Mapping[str, tuple[str, ...]], where: str
) -> None:
    """Explain why `pattern` matches no layer: raise if it names a module without adapter support, or a part of experts.

    `refused`: module path -> why it cannot have an adapter."""
    for path, weights in experts.items():
        owner = path.rpartition(".")[0]
        if any(matches(pattern, name) for name in (*ancestors(path), *(f"{owner}.{weight}" for weight in weights))):
            raise TesseraError(
                f"{pattern} matches no plain linear layer, and it is not the path of an expert adapter",
                where=where,
                allowed=[owner, *(f"{owner}.{name}" for name in EXPERT_WEIGHTS)],
                code="adapter.expert-pattern",
            )
    for path, why in refused.items():
        if any(matches(pattern, above) for above in ancestors(path)):
            raise TesseraError(
                f"{path} cannot have an adapter: {why}",
                where=where,
                code="adapter.unsupported-layer",
            )


def _check_experts(section: LoraSection, paths: Sequence[str]) -> None:
    """Raise if adapters of experts are combined with options that support linear layers only."""
    unserved = {
        "dora": (section.dora, "DoRA"),
        "init": (section.init == "pissa", "an initialisation by singular vectors (PiSSA)"),
        "quantize": (section.quantize is not None, "quantized weights"),
    }
    for key, (is_set, what) in unserved.items():
        if paths and is_set:
            raise TesseraError(
                f"{paths[0]}: adapters of experts do not support {what}",
                where=f"model.lora.{key}",
                fix=f"leave out {key}, or remove experts from model.lora.targets",
                code="adapter.experts-plain-only",
            )


def spelled_out(section: LoraSection, adapters: Adapters) -> LoraSection:
    """Return the section with all adapted layers listed in `targets`, as a run saves it in config.yaml."""
    plain = adapter_of(section)
    targets: list[str | LoraTarget] = [
        path
        if replace(adapter, stacked=()) == plain
        else LoraTarget(modules=path, rank=adapter.rank, alpha=adapter.alpha)
        for path, adapter in adapters.items()
    ]
    return section.model_copy(update={"targets": targets})
