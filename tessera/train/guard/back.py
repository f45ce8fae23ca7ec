"""Bring a run back to an earlier state: a copy in host memory, a checkpoint, or the beginning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tessera.core.tensors import local_part
from tessera.train.guard.copies import HostCopy

if TYPE_CHECKING:
    from tessera.train.trainer import Trainer


class WayBack:
    def __init__(self) -> None:
        self._copy: HostCopy | None = None
        self._first_buffers: dict[str, Tensor] = {}

    def remember_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Keep what the weights' initialisation does not fill."""
        self._first_buffers = {name: tensor.detach().clone() for name, tensor in buffers.items()}

    def take_copy(self, trainer: Trainer) -> None:
        if self._copy is None:
            self._copy = HostCopy(trainer.world.device)
        if self._copy.step != trainer.step:
            self._copy.take(trainer.step, {**trainer.tensors(), **trainer.side_tensors()}, trainer.state_dict())

    def go(self, trainer: Trainer, sound: Callable[[], bool], before: int | None, beginning: bool) -> bool:
        """Fill the trainer with the newest sound state, of fewer than `before` steps if that is given; `beginning`:
        with the first weights if there is no other. Return False, with nothing changed, where there is none."""
        had = self._copy
        if self._from_copy(trainer, sound, before) or self._from_checkpoint(trainer, sound, before):
            return True
        if beginning or self._copy is not had:  # a copy that was not sound has replaced the weights
            self._from_the_beginning(trainer)
            return True
        return False

    def _from_copy(self, trainer: Trainer, sound: Callable[[], bool], before: int | None) -> bool:
        copy = self._copy
        if copy is None or copy.step < 0 or (before is not None and copy.step >= before):
            return False
        copy.put_back({**trainer.tensors(), **trainer.side_tensors()})
        if not sound():
            self._copy = None
            return False
        trainer.take_up(copy.step, copy.state)
        return True

    def _from_checkpoint(self, trainer: Trainer, sound: Callable[[], bool], before: int | None) -> bool:
        while trainer.resume(before):
            if sound():
                return True
            before = trainer.step  # it was saved when the damage was done already
        return False

    @torch.no_grad()
    def _from_the_beginning(self, trainer: Trainer) -> None:
        for name, tensor in trainer.tensors().items():
            if name in self._first_buffers:
                local_part(tensor).copy_(local_part(self._first_buffers[name]))
            elif not name.startswith("model."):
                local_part(tensor).zero_()
        trainer.begin()
        trainer.take_up(0, {"rows_drawn": 0, "callbacks": {}})
