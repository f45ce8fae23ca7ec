"""Check that every trained tensor receives a gradient, and keep the loss scale."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from tessera.core.callback import Callback, TrainerHandle
from tessera.errors import TesseraError, few_names
from tessera.lora.select import A
from tessera.runtime.gradients import LossScale
from tessera.runtime.modules import local_shard

log = logging.getLogger("tessera")


@dataclass(frozen=True)
class ReceivedGradient:
    """Describe the gradient that a trained tensor received, on any rank that holds a shard of it."""

    name: str
    gradient: bool
    nonzero: bool
    lr: float
    weight_decay: float

    @property
    def group(self) -> tuple[str, float, float]:
        return self.name.split(".")[0], self.lr, self.weight_decay


LOOKS = 3  # steps in which a gradient may be zeros: behind an output that begins as zero, the first one's are


class Coverage(Callback):
    """Check after the first step that every trained tensor received a gradient: one that did not would never learn.

    Gradients of zeros are checked again in the next steps, and reported if they stay zero."""

    def __init__(self, names: Sequence[str], policy: Literal["stop", "warn"]) -> None:
        self.names = list(names)  # of all trained parameters of the model; a rank may hold some of them
        self.policy = policy
        self._looks = 0
        self._idle: set[str] | None = None  # received zeros in all steps so far; None before the first

    def on_before_optim(self, trainer: TrainerHandle) -> None:
        if self._looks == LOOKS or self._idle == set():
            return
        self._looks += 1
        received = self._gather(trainer)
        # The first factor of a fresh adapter gets a gradient once the second, which begins at zero, has moved.
        idle = {one.name for one in received if one.gradient and not one.nonzero and f".{A}." not in one.name}
        if self._idle is None:
            self._idle = idle
            if trainer.world.is_main:
                log.info("%s", describe_coverage(received))
            self._check(received, trainer.world.is_main)
        self._idle &= idle
        if self._idle and self._looks == LOOKS and trainer.world.is_main:
            log.warning(
                "%d trained tensors received a gradient of zeros in each of %d steps: %s. That is so for an encoder "
                "that the batches have no input for",
                len(self._idle),
                LOOKS,
                few_names(sorted(self._idle)),
            )

    def _gather(self, trainer: TrainerHandle) -> list[ReceivedGradient]:
        """Return the gradients of all tensors, the same list on every rank."""
        numbers = {name: number for number, name in enumerate(self.names)}
        received = torch.zeros(len(self.names), 4, dtype=torch.float64)
        received[:, 2:] = -1.0
        sizes: dict[int, torch.Tensor] = {}
        for group in trainer.optimizer.param_groups:
            for name, parameter in zip(group["names"], group["params"], strict=True):
                at = numbers[name]
                received[at, 2:] = torch.tensor([group["base_lr"], group["weight_decay"]])
                if parameter.grad is None:
                    continue
                received[at, 0] = 1.0
                part = local_shard(parameter.grad).detach()
                if part.numel():
                    sizes[at] = part.abs().amax().float()
        if sizes:
            device = next(iter(sizes.values())).device
            read = torch.stack([size.to(device) for size in sizes.values()]).cpu()
            received[list(sizes), 1] = (read != 0).double()  # nan counts as a gradient
        if trainer.world.size > 1:
            dist.all_reduce(received, op=dist.ReduceOp.MAX)
        return [
            ReceivedGradient(name, bool(row[0]), bool(row[1]), row[2], row[3])
            for name, row in zip(self.names, received.tolist(), strict=True)
        ]

    def _check(self, received: Iterable[ReceivedGradient], is_main: bool) -> None:
        none = [one.name for one in received if not one.gradient]
        if not none:
            return
        what = (
            f"{len(none)} trained tensors received no gradient in this step, and would never learn: {few_names(none)}"
        )
        if self.policy == "stop":
            raise TesseraError(
                what,
                where="model.freeze",
                fix="freeze them (model.freeze), let the model use them, or set guard.coverage=warn",
                code="model.parameters-without-gradient",
            )
        if is_main:
            log.warning("%s", what)


def describe_coverage(received: Sequence[ReceivedGradient]) -> str:
    """Return a table by parts of the model and groups of the optimizer.

    Gradients of zeros are not in it: in the first step they are correct behind weights that begin at zero, such as the
    output of a diffusion transformer and the second matrix of an adapter."""
    groups: dict[tuple[str, float, float], list[ReceivedGradient]] = {}
    for gradient in received:
        groups.setdefault(gradient.group, []).append(gradient)
    width = max([4, *(len(part) for part, _, _ in groups)])
    lines = [f"gradients of the first step\n  {'part':<{width}}  {'lr':>8}  {'decay':>6}  trained  received"]
    for (part, lr, decay), members in groups.items():
        got = sum(one.gradient for one in members)
        lines.append(f"  {part:<{width}}  {lr:>8.2g}  {decay:>6.2g}  {len(members):>7}  {got:>8}")
    return "\n".join(lines)


class KeepLossScale(Callback):
    """Keep the loss scale of float16 in the checkpoint."""

    def __init__(self, loss_scale: LossScale) -> None:
        self._loss_scale = loss_scale

    def state_tensors(self, trainer: TrainerHandle) -> dict[str, torch.Tensor]:
        return {"loss_scale": self._loss_scale.state}
