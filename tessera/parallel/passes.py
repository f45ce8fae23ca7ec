"""What a step of training computes of a model's products: found from what of it is trained."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import nn

from tessera.core.adapters import is_factor
from tessera.core.pattern import matches
from tessera.core.types import ModelPlan, Passes, Training


@dataclass
class _Part:
    """Weights that make products, counted as often as a token meets them."""

    own: float = 0.0
    trained: float = 0.0
    reached: float = 0.0  # of `own`: those that a gradient passes through
    adapters: float = 0.0
    links: int = 0
    links_reached: int = 0
    first_trained: bool | None = None


def training_of(module: nn.Module, plan: ModelPlan, trained: Collection[str]) -> Training:
    """By part of the model, which is whole. `trained`: names of parameters. A family without a chain of stages is taken
    as trained as a whole.

    A gradient passes through a link of the chain where something trained lies in it or before it: what lies before the
    first trained weight of that link itself is counted, too, which is less than one layer."""
    trained = frozenset(trained)
    parts: dict[str, _Part] = {}
    trained_before = False
    for path in _chain(module, plan):
        link = module.get_submodule(path)
        part = parts.setdefault(path.partition(".")[0], _Part())
        here = {name for name, _ in link.named_parameters() if f"{path}.{name}" in trained}
        own, learned, adapters = _weights(link, here)
        trained_before = trained_before or bool(here)
        if isinstance(link, nn.Embedding):
            continue  # a table that is looked up makes no product
        part.own += own
        part.trained += learned
        part.adapters += adapters
        part.links += 1
        if part.first_trained is None:
            part.first_trained = learned > 0
        if trained_before:
            part.reached += own
            part.links_reached += 1
    return {name: _passes(part) for name, part in parts.items() if part.own}


def _passes(part: _Part) -> Passes:
    return Passes(
        weights=1 + (part.reached + part.trained + 3 * part.adapters) / part.own,
        attention=1 + 2 * part.links_reached / part.links,
        first=2.0 if part.first_trained else 1.0,
    )


def _chain(module: nn.Module, plan: ModelPlan) -> list[str]:
    """Paths of the links, in the order in which they compute."""
    paths = [path for path, _ in module.named_modules() if path]
    return [path for stage in plan.stages for path in paths if matches(stage.pattern, path)]


def _weights(link: nn.Module, here: Collection[str]) -> tuple[float, float, float]:
    """Of one link: all that make products, those of them that are trained (`here`: by name), and those of adapters."""
    own = trained = adapters = 0.0
    for path, part in link.named_modules():
        if isinstance(part, nn.Linear):  # also where its weight is kept in four bits and is no parameter
            size = float(part.in_features * part.out_features)
            own += size
            trained += size if _name(path, "weight") in here else 0.0
            continue
        share = 1.0
        chosen = getattr(part, "top_k", None)
        for name, parameter in part.named_parameters(recurse=False):
            if parameter.dim() < 2:
                continue
            if is_factor(f".{path}.{name}"):
                adapters += parameter.numel()
                continue
            if parameter.dim() == 3 and isinstance(chosen, int):
                share = chosen / parameter.shape[0]  # of stacked experts, a token meets the chosen ones
            own += share * parameter.numel()
            trained += share * parameter.numel() if _name(path, name) in here else 0.0
    return own, trained, adapters


def _name(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
