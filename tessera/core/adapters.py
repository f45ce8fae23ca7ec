"""Low-rank adapters (LoRA): what they are called and how much they weigh. A layer W x becomes W x + scale B A x.

The layer keeps its name and its weight, and gets two more: `q.lora_a.weight` [rank, in], `q.lora_b.weight` [out, rank].

DoRA scales the rows of W + scale B A to lengths that are trained, `q.lora_m.weight` [out]. With PiSSA the matrices
begin as a part of W: what they began as, `q.lora_a0.weight` and `q.lora_b0.weight`, is frozen and taken away from them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tessera.core.errors import TesseraError
from tessera.core.pattern import ancestors, matches, select_trees
from tessera.core.run_config import LoraSection, LoraTarget

A, B = "lora_a", "lora_b"
MAGNITUDE, START_A, START_B = "lora_m", "lora_a0", "lora_b0"
_TAILS = (f".{A}.weight", f".{B}.weight", f".{MAGNITUDE}.weight", f".{START_A}.weight", f".{START_B}.weight")


@dataclass(frozen=True)
class Adapter:
    rank: int
    alpha: float
    rslora: bool = False
    dora: bool = False
    pissa: bool = False

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


Adapters = Mapping[str, Adapter]  # path of a layer -> its adapter


class UnknownLayersError(TesseraError):
    """Report adapters for layers that a model does not have. `layers`: as their file names them, without a prefix."""

    layers: tuple[str, ...] = ()


def factor_names(path: str) -> tuple[str, str]:
    """Return the names of the two parameters of a layer's adapter."""
    return f"{path}{_TAILS[0]}", f"{path}{_TAILS[1]}"


def magnitude_name(path: str) -> str:
    """Return the name of the lengths of rows that DoRA trains."""
    return f"{path}{_TAILS[2]}"


def start_names(path: str) -> tuple[str, str]:
    """Return the names of what both matrices began as, with PiSSA."""
    return f"{path}{_TAILS[3]}", f"{path}{_TAILS[4]}"


def tensor_names(path: str, adapter: Adapter) -> tuple[str, ...]:
    """Return the names of all parameters of a layer's adapter."""
    return (
        *factor_names(path),
        *((magnitude_name(path),) if adapter.dora else ()),
        *(start_names(path) if adapter.pissa else ()),
    )


def is_factor(name: str) -> bool:
    """Return whether a parameter belongs to an adapter."""
    return name.endswith(_TAILS)


def is_output_factor(name: str) -> bool:
    """Return whether a parameter is matrix B of an adapter."""
    return name.endswith(_TAILS[1])


def adapter_of(section: LoraSection) -> Adapter:
    """Return the adapter of layers that have no settings of their own."""
    return Adapter(section.rank, section.alpha, section.rslora, section.dora, section.init == "pissa")


def choose(
    section: LoraSection, layers: Sequence[str], default: Sequence[str], refused: Mapping[str, str]
) -> dict[str, Adapter]:
    """Return the adapters that a recipe asks for, among `layers`; `default`: those it means when it names none.

    `refused`: other paths -> why nothing there can have an adapter. Of several patterns that match a layer the last one
    wins.
    """
    chosen: dict[str, Adapter] = {}
    for number, target in enumerate(section.targets):
        given = target if isinstance(target, LoraTarget) else LoraTarget(modules=target)
        where = f"model.lora.targets.{number}"
        adapter = replace(adapter_of(section), rank=given.rank or section.rank, alpha=given.alpha or section.alpha)
        if not any(matches(given.modules, above) for path in layers for above in ancestors(path)):
            for path, why in refused.items():
                if any(matches(given.modules, above) for above in ancestors(path)):
                    raise TesseraError(f"{path} cannot have an adapter: {why}", where=where)
        chosen.update(dict.fromkeys(select_trees([given.modules], layers, where), adapter))
    if not section.targets:
        chosen = dict.fromkeys(default, adapter_of(section))
    if not chosen:
        raise TesseraError(
            "no layer to adapt: this model has no plain linear layer in its text blocks",
            where="model.lora.targets",
            fix="name linear layers by pattern",
        )
    return {path: chosen[path] for path in layers if path in chosen}


def spelled_out(section: LoraSection, adapters: Adapters) -> LoraSection:
    """Return the same section with every layer named, as a run keeps it: no other file is needed to understand it."""
    plain = adapter_of(section)
    targets: list[str | LoraTarget] = [
        path if adapter == plain else LoraTarget(modules=path, rank=adapter.rank, alpha=adapter.alpha)
        for path, adapter in adapters.items()
    ]
    return section.model_copy(update={"targets": targets})
