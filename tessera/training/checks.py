"""Check that every trained tensor receives a gradient, and save the loss scale of float16 in checkpoints."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist

from tessera.core.callback import Callback, TrainerHandle
from tessera.errors import TesseraError, few_names
from tessera.lora.select import A
from tessera.runtime.gradients import LossScale
from tessera.runtime.modules import local_shard

log = logging.getLogger("tessera")

LOOKS = 3  # number of steps at the beginning in which gradients of zeros are counted


class Coverage(Callback):
    """Check in the first step that every trained tensor received a gradient.

    A gradient of zeros is reported only if it is zero in each of the first `LOOKS` steps: if an output layer is
    initialized with zeros, earlier layers get gradients of zeros only in the first step.
    """

    def __init__(self, names: Sequence[str], policy: Literal["stop", "warn"]) -> None:
        self.names = list(names)  # trained parameters of the full model; a rank may have only some of them
        self.policy = policy
        self._looks = 0
        # Tensors with gradients of zeros in all steps so far; None before the first step.
        self._idle: set[str] | None = None

    def on_before_optim(self, trainer: TrainerHandle) -> None:
        if self._looks == LOOKS or self._idle == set():
            return
        self._looks += 1
        received, nonzero = self._gather(trainer)
        # Factor A of a new adapter has a gradient of zeros as long as factor B is zero.
        idle = {name for name in received - nonzero if f".{A}." not in name}
        if self._idle is None:
            self._idle = idle
            self._check(received, trainer.world.is_main)
        self._idle &= idle
        if self._idle and self._looks == LOOKS and trainer.world.is_main:
            log.warning(
                "%d trained tensors received a gradient of zeros in each of %d steps: %s. An encoder without "
                "input in the batches has such gradients",
                len(self._idle),
                LOOKS,
                few_names(sorted(self._idle)),
            )

    def _gather(self, trainer: TrainerHandle) -> tuple[set[str], set[str]]:
        """Return the names of tensors with a gradient on any rank, and the names of tensors with a nonzero gradient."""
        numbers = {name: number for number, name in enumerate(self.names)}
        received = torch.zeros(len(self.names), 2)
        sizes: dict[int, torch.Tensor] = {}
        for group in trainer.optimizer.param_groups:
            for name, parameter in zip(group["names"], group["params"], strict=True):
                if parameter.grad is not None:
                    received[numbers[name], 0] = 1.0
                    part = local_shard(parameter.grad).detach()
                    if part.numel():
                        sizes[numbers[name]] = part.abs().amax().float()
        if sizes:
            device = next(iter(sizes.values())).device
            read = torch.stack([size.to(device) for size in sizes.values()]).cpu()
            received[list(sizes), 1] = (read != 0).float()  # nan counts as nonzero
        if trainer.world.size > 1:
            dist.all_reduce(received, op=dist.ReduceOp.MAX)
        columns = [
            [name for name, flag in zip(self.names, column, strict=True) if flag] for column in received.T.tolist()
        ]
        return set(columns[0]), set(columns[1])

    def _check(self, received: set[str], is_main: bool) -> None:
        if is_main:
            trained = Counter(name.split(".")[0] for name in self.names)
            reached = Counter(name.split(".")[0] for name in received)
            parts = ", ".join(f"{part} {reached[part]} of {count}" for part, count in trained.items())
            log.info("gradients of the first step, in trained tensors: %s", parts)
        missing = [name for name in self.names if name not in received]
        if not missing:
            return
        what = f"{len(missing)} trained tensors received no gradient in this step, and would never learn: "
        what += few_names(missing)
        if self.policy == "stop":
            raise TesseraError(
                what,
                where="model.freeze",
                fix="freeze them (model.freeze), let the model use them, or set guard.coverage=warn",
                code="model.parameters-without-gradient",
            )
        if is_main:
            log.warning("%s", what)


class KeepLossScale(Callback):
    """Save the loss scale of float16 in checkpoints."""

    def __init__(self, loss_scale: LossScale) -> None:
        self._loss_scale = loss_scale

    def state_tensors(self, trainer: TrainerHandle) -> dict[str, torch.Tensor]:
        return {"loss_scale": self._loss_scale.state}
