"""A running average of the trained weights, kept beside them: dealt out over ranks as they are, saved with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tessera.checkpoint.model_state import reshard
from tessera.core.names import clean
from tessera.core.run_config import EmaSection
from tessera.core.tensors import local_part
from tessera.train.callbacks import Callback, StepResult

if TYPE_CHECKING:
    from tessera.train.trainer import Trainer


class Ema(Callback):
    """In fp32, whatever the weights are kept in: an average that moves by a thousandth a step would stand still in
    bf16. Steps whose update was dropped do not count."""

    def __init__(self, settings: EmaSection, module: nn.Module) -> None:
        self.settings = settings
        self.module = module
        self.updates = 0
        # Two stages of a pipeline on one rank may have copies of one parameter, with one name: both are averaged.
        self._trained = [(clean(n), p) for n, p in module.named_parameters() if p.requires_grad]
        self._average: list[Tensor] = []

    @torch.no_grad()
    def on_start(self, trainer: Trainer) -> None:
        self._follow_names()
        if self.updates == 0:  # it begins here, or the checkpoint knew of none
            for (_, weight), average in zip(self._trained, self._averages(), strict=True):
                local_part(average).copy_(local_part(weight))

    def on_rewind(self, trainer: Trainer) -> None:
        self.on_start(trainer)

    @torch.no_grad()
    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        if not result.applied or result.step % self.settings.every:
            return
        share = 1 - self.decay**self.settings.every
        self.updates += 1
        averages = [local_part(average) for average in self._averages()]
        weights = [local_part(weight).to(torch.float32) for _, weight in self._trained]
        if averages:
            torch._foreach_lerp_(averages, weights, share)

    @property
    def decay(self) -> float:
        warm = (1 + self.updates) / (10 + self.updates) if self.settings.warmup else 1.0
        return min(self.settings.decay, warm)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While it is entered, the module has the average for its weights."""
        reshard(self.module)  # gathered weights would hide a change of their shards
        with torch.no_grad():
            kept = [local_part(weight).detach().clone() for _, weight in self._trained]
            for (_, weight), average in zip(self._trained, self._averages(), strict=True):
                local_part(weight).copy_(local_part(average))
        try:
            yield
        finally:
            reshard(self.module)  # what an evaluation gathered was gathered from the average
            with torch.no_grad():
                for (_, weight), before in zip(self._trained, kept, strict=True):
                    local_part(weight).copy_(before)

    # ------------------------------------------------------------------------------------------ state

    def state_tensors(self, trainer: Trainer) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for (name, _), average in zip(self._trained, self._averages(), strict=True):
            found.setdefault(f"ema.{name}", average)
        return found

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = int(state.get("updates", 0))

    def _averages(self) -> list[Tensor]:
        """Made when they are first asked for: the weights are allocated by then."""
        if len(self._average) != len(self._trained):
            self._average = [weight.detach().to(torch.float32, copy=True) for _, weight in self._trained]
        return self._average

    @torch.no_grad()
    def _follow_names(self) -> None:
        """Of copies with one name, a checkpoint fills the first."""
        first: dict[str, Tensor] = {}
        for (name, _), average in zip(self._trained, self._averages(), strict=True):
            known = first.setdefault(name, average)
            if known is not average:
                local_part(average).copy_(local_part(known))
