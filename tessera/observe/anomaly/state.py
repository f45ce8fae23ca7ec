"""Find damaged weights, and set a run back to its beginning.

A bit that flips in memory makes one value of a weight huge, infinite or nan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tessera.checkpoint.state import MODEL
from tessera.core.callback import RewindHandle
from tessera.runtime.collective import Ranks
from tessera.runtime.modules import local_shard

GROWTH = 100.0  # weights that grow by more than this factor between two checks are damaged, unless updates explain it
FLOOR = 0.01  # growth is measured from at least this value: some tensors begin at zero
STEPS = 10.0  # an update moves a weight by at most this many learning rates; Adam moves it by about one


@dataclass(frozen=True)
class Damage:
    """Describe a damaged tensor: it has values that no update can have produced."""

    name: str
    value: float  # the value with the largest absolute value, or nan
    count: int  # how many values are not finite or too large

    def __str__(self) -> str:
        return f"{self.name} ({self.count} bad number{'s' if self.count > 1 else ''}, worst {self.value:.3g})"


@torch.no_grad()
def largest(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the largest absolute value of this rank's shard of each tensor; nan if the shard contains nan."""
    parts = {name: local_shard(tensor) for name, tensor in tensors.items()}
    parts = {name: part for name, part in parts.items() if part.is_floating_point() and part.numel()}
    maxima = {name: part.detach().abs().amax().float() for name, part in parts.items()}
    if not maxima:
        return {}
    device = next(iter(maxima.values())).device
    return dict(zip(maxima, torch.stack([value.to(device) for value in maxima.values()]).tolist(), strict=True))


def find_damage(tensors: Mapping[str, Tensor], normal: Mapping[str, float], moved: float = 0.0) -> list[Damage]:
    """Return the damaged tensors of all ranks: values are not finite, or far larger than an update can have made them.

    `normal`: the result of `largest` at the last check. Tensors that are not in it count as damaged only if they have
    values that are not finite. `moved`: the sum of the learning rates since that check, which limits how far weights
    can have moved.
    """
    mine: list[Damage] = []
    for name, value in largest(tensors).items():
        limit = math.inf
        if name in normal:
            limit = max(GROWTH * max(normal[name], FLOOR), normal[name] + STEPS * moved)
        if math.isfinite(value) and value <= limit:
            continue
        part = local_shard(tensors[name]).detach()
        bad = int((~(part.abs() <= limit) | ~part.isfinite()).sum())
        mine.append(Damage(name, value, bad))
    worst: dict[str, Damage] = {}
    for of_rank in Ranks.current().on_all(lambda: mine):
        for damage in of_rank:
            other = worst.setdefault(damage.name, damage)
            if not (math.isnan(other.value) or other.value >= damage.value):
                worst[damage.name] = damage
    return list(worst.values())


@torch.no_grad()
def restart(trainer: RewindHandle, first_buffers: Mapping[str, Tensor]) -> None:
    """Set a run back to step 0 with its initial weights. `first_buffers`: the buffers at step 0."""
    for name, tensor in trainer.tensors().items():
        if name in first_buffers:
            local_shard(tensor).copy_(local_shard(first_buffers[name]))
        elif not name.startswith(MODEL):
            local_shard(tensor).zero_()
    trainer.begin()
    trainer.restore_state(0, {"rows_drawn": 0, "callbacks": {}})
