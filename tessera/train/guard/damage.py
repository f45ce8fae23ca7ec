"""Weights that broke by themselves: a bit that flipped makes one number huge or no number at all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tessera.checkpoint.ranks import Ranks
from tessera.core.tensors import local_part

GROWTH = 100.0  # between two looks the largest number of a tensor does not grow so many times larger
FLOOR = 0.01  # what is smaller than this counts as this: tensors begin at zero
STEPS = 10.0  # learning rates that an update moves a number by, at most: Adam's moves it by about one


@dataclass(frozen=True)
class Damage:
    name: str
    value: float  # the worst one
    count: int  # of numbers that are not finite, or too large

    def __str__(self) -> str:
        return f"{self.name} ({self.count} bad number{'s' if self.count > 1 else ''}, worst {self.value:.3g})"


@torch.no_grad()
def largest(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """The largest absolute value in each tensor, of this rank's part; nan where there is one."""
    parts = {name: local_part(tensor) for name, tensor in tensors.items()}
    parts = {name: part for name, part in parts.items() if part.is_floating_point() and part.numel()}
    found = {name: part.detach().abs().amax().float() for name, part in parts.items()}
    if not found:
        return {}
    place = next(iter(found.values())).device
    return dict(zip(found, torch.stack([value.to(place) for value in found.values()]).tolist(), strict=True))


def find_damage(tensors: Mapping[str, Tensor], normal: Mapping[str, float], moved: float = 0.0) -> list[Damage]:
    """Return the tensors with numbers that no training makes, over all ranks, in order.

    `normal`: what `largest` returned when all was well; of a tensor that is not in it, only numbers that are not finite
    are damage. `moved`: the learning rates of the updates since then, added up. With a high learning rate weights do
    grow a hundredfold, and that is no damage.
    """
    mine: list[Damage] = []
    for name, value in largest(tensors).items():
        limit = math.inf
        if name in normal:
            limit = max(GROWTH * max(normal[name], FLOOR), normal[name] + STEPS * moved)
        if math.isfinite(value) and value <= limit:
            continue
        part = local_part(tensors[name]).detach()
        bad = int((~(part.abs() <= limit) | ~part.isfinite()).sum())
        mine.append(Damage(name, value, bad))
    found: dict[str, Damage] = {}
    for told in Ranks.current().each(lambda: mine):
        for one in told:
            other = found.setdefault(one.name, one)
            if not (math.isnan(other.value) or other.value >= one.value):
                found[one.name] = one
    return list(found.values())
