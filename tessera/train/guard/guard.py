"""Looks at every step before its update reaches the weights; on a bad one finds the cause and does what was asked."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tessera.checkpoint.ranks import Ranks
from tessera.core import rng
from tessera.core.errors import TesseraError
from tessera.core.names import clean
from tessera.core.run_config import GuardSection
from tessera.core.tensors import local_part
from tessera.core.types import Batch, RowSource, SparingRows
from tessera.train.callbacks import Fate, Stepper
from tessera.train.guard.blame import Blame, Investigation, Reader
from tessera.train.guard.check import Verdict, update_unless_bad
from tessera.train.guard.copies import HostCopy
from tessera.train.guard.damage import Damage, find_damage, largest
from tessera.train.guard.limits import Running
from tessera.train.jsonl import JsonLines

if TYPE_CHECKING:
    from tessera.train.trainer import Trainer

log = logging.getLogger("tessera")
RECORD = "guard.jsonl"
_SHOWN = 8  # names in a line


class GuardStop(TesseraError):
    """Too many bad steps, or one where the policy is to stop."""

    exit_code = 3


@dataclass(frozen=True)
class Event:
    """One bad step: what was seen, who is to blame, what was done."""

    step: int  # its number, counted from 1
    kind: str
    loss: float
    grad_norm: float
    blame: Blame
    damage: tuple[Damage, ...] = ()

    @property
    def line(self) -> str:
        numbers = f"loss {self.loss:.4g}, gradient norm {self.grad_norm:.4g}"
        cause = f"parameter {_few([str(one) for one in self.damage])}" if self.damage else self.blame.module
        text = f"step {self.step} is bad ({self.kind}: {numbers}): {cause}"
        if self.blame.samples:
            some = "among samples" if self.blame.together else "samples" if len(self.blame.samples) > 1 else "sample"
            text += f"; {some} {_few(self.blame.samples)}"
        return text

    def row(self, action: str, back_to: int | None) -> dict[str, Any]:
        return {
            "step": self.step,
            "kind": self.kind,
            "loss": _number(self.loss),
            "grad_norm": _number(self.grad_norm),
            "module": None if self.damage else self.blame.module,
            "parameters": [{"name": d.name, "worst": _number(d.value), "count": d.count} for d in self.damage],
            "samples": list(self.blame.samples),
            "told_apart": not self.blame.together,
            "action": action,
            **({} if back_to is None else {"back_to": back_to}),
        }


class Guard(Stepper):
    def __init__(self, settings: GuardSection, reader: Reader) -> None:
        self.settings = settings
        self.reader = reader
        self.left_out: dict[str, str] = {}  # samples that rows pass over, with the reason
        self._loss = Running(settings.loss_spike, settings.window, settings.warmup)
        self._norm = Running(settings.grad_spike, settings.window, settings.warmup)
        self._events: list[int] = []  # steps at which there was one
        self._tried: set[int] = set()  # steps that were gone back from
        self._normal: dict[str, float] = {}  # largest number of each tensor of the model, when all was well
        self._copy: HostCopy | None = None
        self._file: JsonLines | None = None
        self._first_buffers: dict[str, Tensor] = {}

    # ------------------------------------------------------------------------------------------ moments of the run

    def on_start(self, trainer: Trainer) -> None:
        if self.settings.policy == "off":
            return
        tensors = _of_model(trainer)
        self._normal = largest(tensors)
        weights = {f"model.{clean(name)}" for name, _ in trainer.module.named_parameters()}
        self._first_buffers = {name: t.detach().clone() for name, t in tensors.items() if name not in weights}

    def on_step_begin(self, trainer: Trainer) -> None:
        every = self.settings.copy_every
        if self.settings.policy == "off" or not every or trainer.step % every:
            return
        if self._copy is None:
            self._copy = HostCopy(trainer.world.device)
        if self._copy.step != trainer.step:
            self._copy.take(trainer.step, {**trainer.tensors(), **trainer.side_tensors()}, trainer.state_dict())

    def on_error(self, trainer: Trainer, error: BaseException) -> None:
        self.on_end(trainer)

    def on_end(self, trainer: Trainer) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def state_dict(self) -> dict[str, Any]:
        return {
            "left_out": dict(self.left_out),
            "events": list(self._events),
            "loss": self._loss.state(),
            "norm": self._norm.state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What was found out stays found out, also when training goes back behind it."""
        self.left_out = {**state.get("left_out", {}), **self.left_out}
        self._events = max(self._events, list(state.get("events", [])), key=len)
        self._loss.restore(state.get("loss", {}))
        self._norm.restore(state.get("norm", {}))

    def rows(self, source: RowSource) -> RowSource:
        """The data without the samples that were found to be bad."""
        if not self.left_out or not isinstance(source, SparingRows):
            return source
        return source.without(self.left_out) or source

    # ------------------------------------------------------------------------------------------ one step

    def update(self, trainer: Trainer, loss: Tensor, grad_norm: Tensor, microbatches: Sequence[Batch]) -> Fate:
        if self.settings.policy == "off":
            return super().update(trainer, loss, grad_norm, microbatches)
        loss_limit, norm_limit = self._loss.limit, self._norm.limit
        verdict = update_unless_bad(trainer.optimizer, loss, grad_norm, loss_limit, norm_limit)
        if verdict.bad:
            kind = Ranks.current().once(lambda: verdict.kind(loss_limit, norm_limit))
            with trainer.paused("looking for the cause of bad numbers"):
                trainer.optimizer.zero_grad(set_to_none=True)
                event = self._examine(trainer, kind, verdict, microbatches)
            return self._answer(trainer, event)
        self._loss.add(verdict.loss)
        self._norm.add(verdict.grad_norm)
        # Now and then, and before each copy and checkpoint: what one goes back to has to be sound.
        often = (self.settings.window, self.settings.copy_every, trainer.config.checkpoint.every)
        if any(every and (trainer.step + 1) % every == 0 for every in often):
            return self._look_at_weights(trainer, verdict)
        return "applied"

    def _look_at_weights(self, trainer: Trainer, verdict: Verdict) -> Fate:
        """Damage may lie where the loss hardly sees it; what is found in order is the measure from now on."""
        found = self._damage(trainer)
        if found:
            event = Event(trainer.step + 1, "damaged", verdict.loss, verdict.grad_norm, Blame(""), tuple(found))
            return self._answer(trainer, event)
        self._normal = largest(_of_model(trainer))
        return "applied"

    def _examine(self, trainer: Trainer, kind: Any, verdict: Verdict, microbatches: Sequence[Batch]) -> Event:
        found = self._damage(trainer)
        event = Event(trainer.step + 1, kind, verdict.loss, verdict.grad_norm, Blame(""), tuple(found))
        if found:
            return event
        settings = trainer.config.train
        investigation = Investigation(
            trainer.module,
            trainer.engine,
            trainer.task,
            trainer.world.device,
            microbatches,
            replace(self.reader, source=self.rows(self.reader.source)),
            seed=lambda: rng.seed_process(settings.seed, "step", trainer.step, trainer.world.rank),
            most_probes=self.settings.probes,
        )
        return replace(event, blame=investigation.blame(kind, self._loss.middle))

    # ------------------------------------------------------------------------------------------ what is done

    def _answer(self, trainer: Trainer, event: Event) -> Fate:
        self._events.append(event.step)
        recent = sum(abs(event.step - step) < self.settings.window for step in self._events)
        if self.settings.policy == "stop" or recent > self.settings.limit:
            self._record(trainer, event, "stopped")
            raise self._stop(trainer, event, recent)
        if event.damage:
            self._go_back(trainer, event)
            return "rewound"
        if self.settings.policy == "rollback" and event.step not in self._tried and self._leave_out(event):
            self._tried.add(event.step)
            self._go_back(trainer, event)
            return "rewound"
        self._record(trainer, event, "skipped")
        return "dropped"

    def _leave_out(self, event: Event) -> bool:
        """Whether rows can pass over what is to blame; going back without that would only come here again."""
        if not event.blame.samples or event.blame.together or not isinstance(self.reader.source, SparingRows):
            return False
        reason = f"bad numbers in step {event.step} ({event.kind}, {event.blame.module})"
        found = dict.fromkeys(event.blame.samples, reason)
        if all(name in self.left_out for name in found) or self.reader.source.without(found) is None:
            return False
        self.left_out.update(found)
        return True

    def _stop(self, trainer: Trainer, event: Event, recent: int) -> GuardStop:
        if trainer.config.checkpoint.at_end and not event.damage:
            trainer.save()  # the bad update never reached the weights
        if self.settings.policy == "stop":
            return GuardStop(event.line, where="guard.policy=stop", fix="guard.policy=skip or rollback goes on")
        return GuardStop(
            f"{recent} bad steps within {self.settings.window}, more than guard.limit={self.settings.limit}; the last: "
            + event.line,
            where="guard.limit",
            fix=f"{trainer.config.folder / RECORD} tells of each; mend the data, lower optim.lr, or raise the limits",
        )

    def _go_back(self, trainer: Trainer, event: Event) -> None:
        trainer.optimizer.zero_grad(set_to_none=True)
        with trainer.paused("going back to a good state"):
            if not self._from_copy(trainer) and not self._from_checkpoint(trainer):
                self._from_the_beginning(trainer)
        self._record(trainer, event, "went back", trainer.step)
        trainer.go_on_from_here()

    def _from_copy(self, trainer: Trainer) -> bool:
        if self._copy is None or self._copy.step < 0:
            return False
        self._copy.put_back({**trainer.tensors(), **trainer.side_tensors()})
        if self._damage(trainer):
            self._copy = None
            return False
        trainer.take_up(self._copy.step, self._copy.state)
        return True

    def _from_checkpoint(self, trainer: Trainer) -> bool:
        before: int | None = None
        while trainer.resume(before):
            if not self._damage(trainer):
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

    def _damage(self, trainer: Trainer) -> list[Damage]:
        found = find_damage(trainer.tensors(), self._normal)
        return [replace(one, name=one.name.removeprefix("model.")) for one in found]

    def _record(self, trainer: Trainer, event: Event, action: str, back_to: int | None = None) -> None:
        if not trainer.world.is_main:
            return
        if self._file is None:
            self._file = JsonLines(trainer.config.folder / RECORD)
        self._file.write(event.row(action, back_to))
        log.warning("guard: %s; %s%s", event.line, action, "" if back_to is None else f" to step {back_to}")


def _of_model(trainer: Trainer) -> dict[str, Tensor]:
    """Weights and buffers; how large moments of the optimizer get, nobody knows beforehand."""
    return {name: tensor for name, tensor in trainer.tensors().items() if name.startswith("model.")}


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _number(value: float) -> float | str:
    """JSON knows no nan."""
    return value if math.isfinite(value) else str(value)
