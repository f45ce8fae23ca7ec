"""Low-rank adapters (LoRA): what they are called and how much they weigh. A layer W x becomes W x + scale B A x.

The layer keeps its name and its weight, and gets two more: `q.lora_a.weight` [rank, in], `q.lora_b.weight` [out, rank].
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tessera.core.errors import TesseraError
from tessera.core.pattern import ancestors, matches, select_trees
from tessera.core.run_config import LoraSection, LoraTarget

A, B = "lora_a", "lora_b"
_TAILS = (f".{A}.weight", f".{B}.weight")


@dataclass(frozen=True)
class Adapter:
    rank: int
    alpha: float
    rslora: bool = False

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


def is_factor(name: str) -> bool:
    """Return whether a parameter belongs to an adapter."""
    return name.endswith(_TAILS)


def is_output_factor(name: str) -> bool:
    """Return whether a parameter is matrix B of an adapter."""
    return name.endswith(_TAILS[1])


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
        adapter = Adapter(given.rank or section.rank, given.alpha or section.alpha, section.rslora)
        if not any(matches(given.modules, above) for path in layers for above in ancestors(path)):
            for path, why in refused.items():
                if any(matches(given.modules, above) for above in ancestors(path)):
                    raise TesseraError(f"{path} cannot have an adapter: {why}", where=where)
        chosen.update(dict.fromkeys(select_trees([given.modules], layers, where), adapter))
    if not section.targets:
        chosen = dict.fromkeys(default, Adapter(section.rank, section.alpha, section.rslora))
    if not chosen:
        raise TesseraError(
            "no layer to adapt: this model has no plain linear layer in its text blocks",
            where="model.lora.targets",
            fix="name linear layers by pattern",
        )
    return {path: chosen[path] for path in layers if path in chosen}


def spelled_out(section: LoraSection, adapters: Adapters) -> LoraSection:
    """Return the same section with every layer named, as a run keeps it: no other file is needed to understand it."""
    plain = Adapter(section.rank, section.alpha, section.rslora)
    targets: list[str | LoraTarget] = [
        path if adapter == plain else LoraTarget(modules=path, rank=adapter.rank, alpha=adapter.alpha)
        for path, adapter in adapters.items()
    ]
    return section.model_copy(update={"targets": targets})
