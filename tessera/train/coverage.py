"""After the first step: which of the trained tensors received a gradient. One that did not would never learn."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist

from tessera.core.adapters import A
from tessera.core.errors import TesseraError
from tessera.core.tensors import local_part
from tessera.train.callbacks import Callback

if TYPE_CHECKING:
    from tessera.train.trainer import Trainer

log = logging.getLogger("tessera")
_SHOWN = 8


@dataclass(frozen=True)
class Received:
    """What a trained tensor got, on any rank that has some of it."""

    name: str
    gradient: bool
    nonzero: bool
    lr: float
    weight_decay: float

    @property
    def group(self) -> tuple[str, float, float]:
        return self.name.split(".")[0], self.lr, self.weight_decay


class Coverage(Callback):
    def __init__(self, names: Sequence[str], policy: Literal["stop", "warn"]) -> None:
        self.names = list(names)  # of all trained parameters of the model; a rank may have some of them
        self.policy = policy
        self._done = False

    def on_before_optim(self, trainer: Trainer) -> None:
        if self._done:
            return
        self._done = True
        found = self._gather(trainer)
        if trainer.world.is_main:
            log.info("%s", describe(found))
        self._judge(found, trainer.world.is_main)

    def _gather(self, trainer: Trainer) -> list[Received]:
        """The same on every rank: whatever one has seen of a tensor counts."""
        place = {name: number for number, name in enumerate(self.names)}
        seen = torch.zeros(len(self.names), 4, dtype=torch.float64)
        seen[:, 2:] = -1.0
        sizes: dict[int, torch.Tensor] = {}
        for group in trainer.optimizer.param_groups:
            for name, parameter in zip(group["names"], group["params"], strict=True):
                at = place[name]
                seen[at, 2:] = torch.tensor([group["base_lr"], group["weight_decay"]])
                if parameter.grad is None:
                    continue
                seen[at, 0] = 1.0
                part = local_part(parameter.grad).detach()
                if part.numel():
                    sizes[at] = part.abs().amax().float()
        if sizes:
            there = next(iter(sizes.values())).device
            read = torch.stack([size.to(there) for size in sizes.values()]).cpu()
            seen[list(sizes), 1] = (read != 0).double()  # what is no number is something, too
        if trainer.world.size > 1:
            dist.all_reduce(seen, op=dist.ReduceOp.MAX)
        return [
            Received(name, bool(row[0]), bool(row[1]), row[2], row[3])
            for name, row in zip(self.names, seen.tolist(), strict=True)
        ]

    def _judge(self, found: Iterable[Received], speaks: bool) -> None:
        none = [one.name for one in found if not one.gradient]
        # The first factor of a fresh adapter gets a gradient once the second, which begins at zero, has moved.
        idle = [one.name for one in found if one.gradient and not one.nonzero and f".{A}." not in one.name]
        if idle and speaks:
            log.warning(
                "%d trained tensors received a gradient of zeros in this step: %s. So it is with a tower that the "
                "batch had nothing for",
                len(idle),
                _few(idle),
            )
        if not none:
            return
        what = f"{len(none)} trained tensors received no gradient in this step, and would never learn: {_few(none)}"
        if self.policy == "stop":
            raise TesseraError(
                what,
                where="model.freeze",
                fix="freeze them (model.freeze), let the model use them, or set guard.coverage=warn",
            )
        if speaks:
            log.warning("%s", what)


def describe(found: Iterable[Received]) -> str:
    """A table by the model's parts and the optimizer's groups."""
    groups: dict[tuple[str, float, float], list[Received]] = {}
    for one in found:
        groups.setdefault(one.group, []).append(one)
    width = max([4, *(len(part) for part, _, _ in groups)])
    lines = [f"gradients of the first step\n  {'part':<{width}}  {'lr':>8}  {'decay':>6}  trained  received  all zero"]
    for (part, lr, decay), members in groups.items():
        got = sum(one.gradient for one in members)
        zero = sum(one.gradient and not one.nonzero for one in members)
        lines.append(f"  {part:<{width}}  {lr:>8.2g}  {decay:>6.2g}  {len(members):>7}  {got:>8}  {zero:>8}")
    return "\n".join(lines)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
