"""Find damage in the state of a run, keep a copy of the state in host memory, and take the run back to a good state.

A bit that flips in memory makes one number of a weight huge, or not finite. A run goes back to the copy, to a
checkpoint, or to its beginning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tessera.checkpoint.collective import Ranks
from tessera.core.callback import RewindHandle, TrainerHandle
from tessera.runtime import device as devices
from tessera.runtime.modules import local_shard

GROWTH = 100.0  # between two checks the largest number of a tensor does not grow by this factor
FLOOR = 0.01  # smaller values count as this one: tensors begin at zero
STEPS = 10.0  # learning rates that an update moves a number by, at most: Adam moves it by about one


@dataclass(frozen=True)
class Damage:
    """Describe numbers of a tensor that training cannot produce."""

    name: str
    value: float  # the worst one
    count: int  # of numbers that are not finite, or too large

    def __str__(self) -> str:
        return f"{self.name} ({self.count} bad number{'s' if self.count > 1 else ''}, worst {self.value:.3g})"


@torch.no_grad()
def largest(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the largest absolute value of this rank's part of each tensor; nan where there is one."""
    parts = {name: local_shard(tensor) for name, tensor in tensors.items()}
    parts = {name: part for name, part in parts.items() if part.is_floating_point() and part.numel()}
    maxima = {name: part.detach().abs().amax().float() for name, part in parts.items()}
    if not maxima:
        return {}
    device = next(iter(maxima.values())).device
    return dict(zip(maxima, torch.stack([value.to(device) for value in maxima.values()]).tolist(), strict=True))


def find_damage(tensors: Mapping[str, Tensor], normal: Mapping[str, float], moved: float = 0.0) -> list[Damage]:
    """Return the tensors with numbers that training cannot produce, over all ranks, in order.

    `normal`: the result of `largest` at the last sound check. In a tensor that is not in it, only numbers that are not
    finite are damage. `moved`: the sum of the learning rates of the updates since then: with a high learning rate
    weights do grow a hundredfold.
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


class StateCopy:
    """Keep this rank's shards of all tensors in host memory, allocated once, and pinned where that is faster."""

    def __init__(self, device: torch.device) -> None:
        self._pin = devices.supports(device, "pinned_memory")
        self._parts: dict[str, Tensor] = {}
        self.step = -1
        self.state: Mapping[str, Any] = {}

    @torch.no_grad()
    def take(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        for name, tensor in tensors.items():
            part = local_shard(tensor).detach()
            if name not in self._parts:
                self._parts[name] = torch.empty(part.shape, dtype=part.dtype, pin_memory=self._pin)
            self._parts[name].copy_(part)
        self.step, self.state = step, state

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            local_shard(tensor).detach().copy_(self._parts[name])


class Rollback:
    """Bring a run back to an earlier state."""

    def __init__(self) -> None:
        self._copy: StateCopy | None = None
        self._first_buffers: dict[str, Tensor] = {}

    def remember_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Keep the buffers, which the initialisation of weights does not fill."""
        self._first_buffers = {name: tensor.detach().clone() for name, tensor in buffers.items()}

    def take_copy(self, trainer: TrainerHandle) -> None:
        if self._copy is None:
            self._copy = StateCopy(trainer.world.device)
        if self._copy.step != trainer.step:
            self._copy.take(trainer.step, {**trainer.tensors(), **trainer.side_tensors()}, trainer.state_dict())

    def go(self, trainer: RewindHandle, sound: Callable[[], bool], before: int | None = None) -> bool:
        """Fill the trainer with the newest sound state, else with the initial weights.

        `before`: only with a state of fewer steps, and not with the initial weights. Return False, with nothing
        changed, where there is none.
        """
        had = self._copy
        if self._from_copy(trainer, sound, before) or self._from_checkpoint(trainer, sound, before):
            return True
        if before is None or self._copy is not had:  # a copy that was not sound has replaced the weights
            self._from_the_beginning(trainer)
            return True
        return False

    def _from_copy(self, trainer: RewindHandle, sound: Callable[[], bool], before: int | None) -> bool:
        copy = self._copy
        if copy is None or copy.step < 0 or (before is not None and copy.step >= before):
            return False
        copy.restore({**trainer.tensors(), **trainer.side_tensors()})
        if not sound():
            self._copy = None
            return False
        trainer.restore_state(copy.step, copy.state)
        return True

    def _from_checkpoint(self, trainer: RewindHandle, sound: Callable[[], bool], before: int | None) -> bool:
        while trainer.resume(before):
            if sound():
                return True
            before = trainer.step  # it was saved after the damage
        return False

    @torch.no_grad()
    def _from_the_beginning(self, trainer: RewindHandle) -> None:
        for name, tensor in trainer.tensors().items():
            if name in self._first_buffers:
                local_shard(tensor).copy_(local_shard(self._first_buffers[name]))
            elif not name.startswith("model."):
                local_shard(tensor).zero_()
        trainer.begin()
        trainer.restore_state(0, {"rows_drawn": 0, "callbacks": {}})
