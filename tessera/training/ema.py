"""Keep a running average of the trained weights, sharded over ranks as the weights are, and saved with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tessera.checkpoint.state import reshard
from tessera.config.run_config import EmaSection
from tessera.core.callback import Callback, StepResult, TrainerHandle
from tessera.runtime.modules import clean_name, local_shard
from tessera.runtime.torch_internals import foreach_lerp_


class Ema(Callback):
    """Keep an exponential moving average of the trained weights, updated every `train.ema.every` steps.

    A step without an applied update is left out.

    The average is in fp32, because bf16 would lose relative changes of a thousandth.
    """

    def __init__(self, settings: EmaSection, module: nn.Module) -> None:
        self.settings = settings
        self.module = module
        self.updates = 0
        # Two pipeline stages on one rank may have copies of a tied parameter with the same name: both are averaged.
        self._trained = [(clean_name(n), p) for n, p in module.named_parameters() if p.requires_grad]
        self._average: list[Tensor] = []

    @torch.no_grad()
    def on_start(self, trainer: TrainerHandle) -> None:
        self._follow_names()
        if self.updates == 0:  # the run is new, or its checkpoint has no average
            for (_, weight), average in zip(self._trained, self._averages(), strict=True):
                local_shard(average).copy_(local_shard(weight))

    def on_rewind(self, trainer: TrainerHandle) -> None:
        self.on_start(trainer)

    @torch.no_grad()
    def on_step_end(self, trainer: TrainerHandle, result: StepResult) -> None:
        if not result.applied or result.step % self.settings.every:
            return
        share = 1 - self.decay**self.settings.every
        self.updates += 1
        averages = [local_shard(average) for average in self._averages()]
        weights = [local_shard(weight).to(torch.float32) for _, weight in self._trained]
        if averages:
            foreach_lerp_(averages, weights, share)

    @property
    def decay(self) -> float:
        warm = (1 + self.updates) / (10 + self.updates) if self.settings.warmup else 1.0
        return min(self.settings.decay, warm)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside of the `with` block, replace the weights of the module by their average."""
        reshard(self.module)  # free gathered weights, which FSDP would use instead of the changed shards
        with torch.no_grad():
            weights = [local_shard(weight).detach().clone() for _, weight in self._trained]
            for (_, weight), average in zip(self._trained, self._averages(), strict=True):
                local_shard(weight).copy_(local_shard(average))
        try:
            yield
        finally:
            reshard(self.module)  # free weights that FSDP gathered from the average
            with torch.no_grad():
                for (_, weight), before in zip(self._trained, weights, strict=True):
                    local_shard(weight).copy_(before)

    # ------------------------------------------------------------------------------------------ state

    def state_tensors(self, trainer: TrainerHandle) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for (name, _), average in zip(self._trained, self._averages(), strict=True):
            tensors.setdefault(f"ema.{name}", average)
        return tensors

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = int(state.get("updates", 0))

    def _averages(self) -> list[Tensor]:
        """Return the averages of all trained parameters. The first call allocates them."""
        if len(self._average) != len(self._trained):
            self._average = [weight.detach().to(torch.float32, copy=True) for _, weight in self._trained]
        return self._average

    @torch.no_grad()
    def _follow_names(self) -> None:
        """Copy averages between parameters with the same name: a checkpoint restores only the first of them."""
        first: dict[str, Tensor] = {}
        for (name, _), average in zip(self._trained, self._averages(), strict=True):
            source = first.setdefault(name, average)
            if source is not average:
                local_shard(average).copy_(local_shard(source))
