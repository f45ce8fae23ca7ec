"""Look at every step before its update reaches the weights, and do what the policy says about a bad one.

What happens when, in plain words: docs/how-to/survive-bad-steps.md. Two rules stand above all others: numbers that are
not finite never reach the weights, and no healthy run is worse off for being watched.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tessera.checkpoint.ranks import Ranks
from tessera.core import rng
from tessera.core.names import clean
from tessera.core.run_config import GuardSection
from tessera.core.types import Batch, RowSource, SparingRows
from tessera.train.callbacks import Fate, Stepper
from tessera.train.guard.back import WayBack
from tessera.train.guard.blame import Blame, Investigation, Reader
from tessera.train.guard.check import Limits, Verdict, update_within
from tessera.train.guard.damage import Damage, find_damage, largest
from tessera.train.guard.events import RECORD, Event, GuardStop
from tessera.train.guard.limits import IN_A_ROW, Running
from tessera.train.guard.trend import LASTING, Trend
from tessera.train.jsonl import JsonLines, read_jsonl

if TYPE_CHECKING:
    from tessera.train.trainer import Trainer

log = logging.getLogger("tessera")
DROPS = 3  # spikes whose updates may be dropped within a window: a run is never starved of updates
BACK_TO_ONE_STATE = 3  # times that damaged weights may bring the run back to one and the same state
INVESTIGATIONS = 10  # within a window: each may take as long as `guard.probes` steps
SLOWER = 0.5  # of the learning rate, after going back from a loss that rose and stayed


class Guard(Stepper):
    def __init__(self, settings: GuardSection, reader: Reader, clip_norm: float | None = None, warmup: int = 0) -> None:
        """`clip_norm`: of all gradients. `warmup`: steps of the learning rate's; none of them is called a spike."""
        self.settings = settings
        self.reader = reader
        self.lr_share = 1.0
        self.left_out: dict[str, str] = {}  # samples that rows pass over, with the reason
        self._clip_norm = math.inf if clip_norm is None else clip_norm
        self._warmup = warmup
        self._loss = Running(settings.loss_spike, settings.window, settings.warmup)
        self._norm = Running(settings.grad_spike, settings.window, settings.warmup, ordinary=clip_norm or 0.0)
        self._trend = Trend()
        self._spikes = 0  # in a row
        self._not_finite = 0  # in a row
        self._dropped: list[int] = []  # spikes of late whose updates were
        self._investigated: list[int] = []  # steps of late that were run again
        self._left: set[int] = set()  # steps that were gone back from
        self._returns: dict[int, int] = {}  # how often damage led back to a state
        self._slowed_at = 0.0  # the learning rate that `lr_share` is a share of
        self._passed: set[int] = set()  # steps at which this run stopped before: whoever resumes it knows of them
        self._normal: dict[str, float] = {}  # largest number of each parameter, when all was well
        self._moved = 0.0  # learning rates since then
        self._never_finite: dict[str, Damage] = {}  # tensors that were not finite when the run began
        self._way_back = WayBack()
        self._counts: dict[str, int] = {}  # of events, by what was done
        self._file: JsonLines | None = None

    # ------------------------------------------------------------------------------------------ moments of the run

    def on_start(self, trainer: Trainer) -> None:
        if self.settings.policy == "off":
            return
        self._never_finite = {one.name: one for one in find_damage(trainer.tensors(), {})}
        self._measure(trainer)
        weights = self._weights(trainer)
        self._way_back.remember_buffers({n: t for n, t in _of_model(trainer).items() if n not in weights})
        path = trainer.config.folder / RECORD
        stops = lambda: [row["step"] for row in read_jsonl(path) if row.get("action") == "stopped"]  # noqa: E731
        self._passed = set(Ranks.current().once(stops))
        if self._slowed_at not in (0.0, trainer.config.optim.lr):
            self.lr_share = 1.0  # the learning rate was changed by whoever resumed the run
        if self.lr_share < 1 and trainer.world.is_main:
            log.info("guard: the learning rate is %g times optim.lr since the run went back", self.lr_share)

    def on_step_begin(self, trainer: Trainer) -> None:
        every = self.settings.copy_every
        if self.settings.policy == "off" or not every or trainer.step % every:
            return
        if not (self._spikes or self._not_finite or self._trend.lost):  # a copy is of a state before the first alarm
            self._way_back.take_copy(trainer)

    def on_error(self, trainer: Trainer, error: BaseException) -> None:
        self.on_end(trainer)

    def on_end(self, trainer: Trainer) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._counts and trainer.world.is_main:
            done = ", ".join(f"{action} {count}" for action, count in sorted(self._counts.items()))
            log.info("guard: bad steps in all: %s (%s)", done, trainer.config.folder / RECORD)
            self._counts = {}

    def state_dict(self) -> dict[str, Any]:
        return {
            "left_out": dict(self.left_out),
            "loss": self._loss.state(),
            "norm": self._norm.state(),
            "trend": self._trend.state(),
            "spikes": self._spikes,
            "dropped": list(self._dropped),
            "lr_share": self.lr_share,
            "slowed_at": self._slowed_at,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What was found out and what was changed stays so, also when training goes back behind it."""
        self.left_out = {**state.get("left_out", {}), **self.left_out}
        self._loss.restore(state.get("loss", {}))
        self._norm.restore(state.get("norm", {}))
        self._trend.restore(state.get("trend", {}))
        self._spikes = int(state.get("spikes", 0))
        self._not_finite = 0  # whoever resumes a run that stopped at so many gives it as many again
        self._dropped = list(state.get("dropped", []))
        if self.lr_share == 1.0:
            self.lr_share = float(state.get("lr_share", 1.0))
            self._slowed_at = float(state.get("slowed_at", 0.0))

    def rows(self, source: RowSource) -> RowSource:
        """Return the data without the samples that were found to be bad."""
        if not self.left_out or not isinstance(source, SparingRows):
            return source
        return source.without(self.left_out) or source

    # ------------------------------------------------------------------------------------------ one step

    def update(self, trainer: Trainer, loss: Tensor, grad_norm: Tensor, microbatches: Sequence[Batch]) -> Fate:
        if self.settings.policy == "off":
            return super().update(trainer, loss, grad_norm, microbatches)
        verdict = update_within(trainer.optimizer, loss, grad_norm, self._limits(trainer.step + 1))
        if verdict.kind == "not finite":
            return self._on_not_finite(trainer, verdict, microbatches)
        self._not_finite = 0
        if verdict.applied:
            self._moved += max(float(group["lr"]) for group in trainer.optimizer.param_groups)
        self._loss.add(verdict.loss)
        self._norm.add(verdict.grad_norm)
        diverged = self._trend.add(verdict.loss, self._loss.level)
        if verdict.kind is not None:
            return self._on_spike(trainer, verdict, microbatches)
        self._spikes = 0
        if diverged:
            return self._on_divergence(trainer, verdict)
        # Now and then, and before each copy and checkpoint: what one goes back to has to be sound.
        often = (self.settings.window, self.settings.copy_every, trainer.config.checkpoint.every)
        if any(every and (trainer.step + 1) % every == 0 for every in often):
            return self._look_at_weights(trainer, verdict)
        return "applied"

    def _limits(self, step: int) -> Limits:
        if step <= self._warmup:
            return Limits()
        usual = self._norm.level
        hold = self.settings.policy != "clip" and self._spikes < IN_A_ROW - 1 and self._drops_left(step)
        if self.settings.policy == "stop":
            hold = step not in self._passed
        clip_to = min(self._clip_norm, usual) if usual > 0 else self._clip_norm
        return Limits(self._loss.limit, self._norm.limit, self._clip_norm, clip_to, hold)

    def _drops_left(self, step: int) -> bool:
        self._dropped = [at for at in self._dropped if step - at < self.settings.window]
        return len(self._dropped) < DROPS

    def _on_not_finite(self, trainer: Trainer, verdict: Verdict, microbatches: Sequence[Batch]) -> Fate:
        self._not_finite += 1
        event = self._event(trainer, verdict, microbatches)
        if event.damage:
            return self._on_damage(trainer, event)
        self._stop_if_asked(trainer, event)
        if self._not_finite > self.settings.limit:
            if self._retreat(trainer, event, event.step - self._not_finite + 1):
                return "rewound"
            self._record(trainer, event, "stopped")
            raise self._too_many(trainer, event)
        if self._go_back_without_samples(trainer, event):
            return "rewound"
        self._record(trainer, event, "skipped")
        return "dropped"

    def _on_spike(self, trainer: Trainer, verdict: Verdict, microbatches: Sequence[Batch]) -> Fate:
        self._spikes += 1
        event = self._event(trainer, verdict, microbatches)
        if event.damage:
            return self._on_damage(trainer, event)
        self._stop_if_asked(trainer, event)
        if self._go_back_without_samples(trainer, event):
            return "rewound"
        if self._spikes >= IN_A_ROW:
            if self._retreat(trainer, event, event.step - IN_A_ROW + 1):
                return "rewound"
            self._loss.accept_new_level()
            self._norm.accept_new_level()
            self._spikes = 0
            level = f"{IN_A_ROW} in a row: loss {self._loss.level:.4g}, gradient norm {self._norm.level:.4g} is the"
            event = replace(event, note=f"{level} level from now on; if it does not fall again, lower optim.lr")
        if verdict.applied:
            self._record(trainer, event, "clipped")
            return "applied"
        self._dropped.append(event.step)
        self._record(trainer, event, "skipped")
        return "dropped"

    def _on_divergence(self, trainer: Trainer, verdict: Verdict) -> Fate:
        self._trend.told()
        began, best = self._trend.start, self._trend.best
        note = (
            f"training diverges: for {LASTING} steps the loss has been above the {began:.4g} that it began with (its "
            f"best level was {best:.4g}); unless the data changed, go back to an earlier checkpoint and lower optim.lr "
            f"(now {trainer.config.optim.lr:g}) or lengthen optim.schedule.warmup"
        )
        event = Event(trainer.step + 1, "diverged", verdict.loss, verdict.grad_norm, note=note)
        self._stop_if_asked(trainer, event)
        if self._retreat(trainer, event, event.step - LASTING + 1):
            return "rewound"
        self._record(trainer, event, "reported")
        return "applied"

    def _look_at_weights(self, trainer: Trainer, verdict: Verdict) -> Fate:
        """Damage may lie where the loss hardly sees it; what is found in order is the measure from now on."""
        found = self._damage(trainer)
        if found:
            event = Event(trainer.step + 1, "damaged", verdict.loss, verdict.grad_norm, damage=tuple(found))
            return self._on_damage(trainer, event)
        self._measure(trainer)
        return "applied"

    # ------------------------------------------------------------------------------------------ what is known of it

    def _event(self, trainer: Trainer, verdict: Verdict, microbatches: Sequence[Batch]) -> Event:
        with trainer.paused("looking for the cause of bad numbers"):
            found = self._damage(trainer)
            if verdict.kind == "not finite" and not found:
                weights = {f"model.{clean(name)}" for name, _ in trainer.module.named_parameters()}
                found = [replace(one, name=_short(n)) for n, one in self._never_finite.items() if n in weights]
            step = trainer.step + 1
            event = Event(step, str(verdict.kind), verdict.loss, verdict.grad_norm, damage=tuple(found))
            if found or not self._asks_for_blame(verdict, step):
                return event
            trainer.optimizer.zero_grad(set_to_none=True)
            return replace(event, blame=self._investigate(trainer, verdict, microbatches))

    def _asks_for_blame(self, verdict: Verdict, step: int) -> bool:
        """A spike is investigated on request, or where the policy needs to know; and nothing too often."""
        self._investigated = [at for at in self._investigated if abs(step - at) < self.settings.window]
        wanted = self.settings.blame == "always" or (
            self.settings.blame == "auto"
            and (verdict.kind == "not finite" or self.settings.policy in ("rollback", "stop"))
        )
        ends = self._not_finite > self.settings.limit  # the run: its last word is to be a true one
        if not wanted or (len(self._investigated) >= INVESTIGATIONS and not ends):
            return False
        self._investigated.append(step)
        return True

    def _investigate(self, trainer: Trainer, verdict: Verdict, microbatches: Sequence[Batch]) -> Blame:
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
        assert verdict.kind is not None
        return investigation.blame(verdict.kind, self._loss.level)

    def _damage(self, trainer: Trainer) -> list[Damage]:
        tensors = {name: tensor for name, tensor in trainer.tensors().items() if name not in self._never_finite}
        found = find_damage(tensors, self._normal, self._moved)
        return [replace(one, name=_short(one.name)) for one in found]

    def _measure(self, trainer: Trainer) -> None:
        self._normal, self._moved = largest(self._weights(trainer)), 0.0

    def _weights(self, trainer: Trainer) -> dict[str, Tensor]:
        """How large buffers and moments of the optimizer may get, nobody knows beforehand."""
        names = {f"model.{clean(name)}" for name, _ in trainer.module.named_parameters()} - self._never_finite.keys()
        return {name: tensor for name, tensor in _of_model(trainer).items() if name in names}

    # ------------------------------------------------------------------------------------------ what is done

    def _stop_if_asked(self, trainer: Trainer, event: Event) -> None:
        """A run that is resumed does not stop at the same step again: that step is skipped or clipped then."""
        if self.settings.policy != "stop" or event.step in self._passed:
            return
        self._record(trainer, event, "stopped")
        if event.kind != "diverged":
            self._save(trainer)  # the bad update never reached the weights
        raise GuardStop(
            event.line,
            where="guard.policy=stop",
            fix=f"`tessera resume {trainer.config.folder}` goes on behind this step; guard.policy=clip does not stop",
        )

    def _save(self, trainer: Trainer) -> None:
        if trainer.config.checkpoint.at_end:
            trainer.save()

    def _too_many(self, trainer: Trainer, event: Event) -> GuardStop:
        what = f"{self._not_finite} steps in a row were not finite (guard.limit={self.settings.limit}); the last: "
        if event.blame is not None and event.blame.everyone:
            # Saved, this state would push out a checkpoint of a better one.
            fix = f"the run has diverged, or all data is bad: lower optim.lr (now {trainer.config.optim.lr:g}), begin "
            fix += f"from an earlier checkpoint, and look at the inputs; {trainer.config.folder / RECORD} has each step"
        else:
            self._save(trainer)
            fix = f"{trainer.config.folder / RECORD} names module and samples of each: mend the data or the model"
        return GuardStop(what + event.line, where="guard.limit", fix=fix)

    def _on_damage(self, trainer: Trainer, event: Event) -> Fate:
        self._stop_if_asked_for_damage(trainer, event)
        with trainer.paused("going back to a good state"):
            trainer.optimizer.zero_grad(set_to_none=True)
            self._way_back.go(trainer, lambda: not self._damage(trainer), None, beginning=True)
        self._left.add(event.step)
        self._returns[trainer.step] = self._returns.get(trainer.step, 0) + 1
        self._went_back(trainer, event)
        return "rewound"

    def _stop_if_asked_for_damage(self, trainer: Trainer, event: Event) -> None:
        """Damage stays: a step with it can be neither skipped nor clipped. What comes again is no flipped bit."""
        fix = ""
        if any(name in self._never_finite for one in event.damage for name in (one.name, f"model.{one.name}")):
            fix = "these numbers were not finite when the run began: look at the folder or checkpoint they came from"
        elif event.step in self._left or max(self._returns.values(), default=0) >= BACK_TO_ONE_STATE:
            fix = "it came again after going back, so it is no flipped bit: something writes into the weights, or the "
            fix += "device computes wrongly"
        elif self.settings.policy == "stop":
            fix = f"`tessera resume {trainer.config.folder}` goes on from the last checkpoint"
        if fix:
            self._record(trainer, event, "stopped")
            raise GuardStop(event.line, where=f"guard.policy={self.settings.policy}", fix=fix)

    def _go_back_without_samples(self, trainer: Trainer, event: Event) -> bool:
        """Once for a step, and only where rows can pass over what is to blame: else it would only come here again."""
        if self.settings.policy != "rollback" or event.step in self._left or not self._leave_out(event):
            return False
        self._left.add(event.step)
        with trainer.paused("going back to a good state"):
            trainer.optimizer.zero_grad(set_to_none=True)
            self._way_back.go(trainer, lambda: not self._damage(trainer), None, beginning=True)
        self._went_back(trainer, event)
        return True

    def _leave_out(self, event: Event) -> bool:
        blame = event.blame
        if blame is None or not blame.samples or blame.together or not isinstance(self.reader.source, SparingRows):
            return False
        reason = f"bad numbers in step {event.step} ({event.kind}, {blame.module})"
        found = dict.fromkeys(blame.samples, reason)
        if all(name in self.left_out for name in found) or self.reader.source.without(found) is None:
            return False
        self.left_out.update(found)
        return True

    def _retreat(self, trainer: Trainer, event: Event, first: int) -> bool:
        """Go back to a state before step `first`, where it began, and on with a lower learning rate; once in a run."""
        if self.settings.policy != "rollback" or self.lr_share < 1:
            return False
        with trainer.paused("going back to a good state"):
            trainer.optimizer.zero_grad(set_to_none=True)
            if not self._way_back.go(trainer, lambda: not self._damage(trainer), first, beginning=False):
                return False
        self.lr_share, self._slowed_at = SLOWER, trainer.config.optim.lr
        note = f"the learning rate is {SLOWER:g} times optim.lr from now on"
        self._went_back(trainer, replace(event, note=f"{event.note}; {note}" if event.note else note))
        return True

    def _went_back(self, trainer: Trainer, event: Event) -> None:
        self._spikes = self._not_finite = 0
        self._record(trainer, event, "went back", trainer.step)
        trainer.go_on_from_here()

    def _record(self, trainer: Trainer, event: Event, action: str, back_to: int | None = None) -> None:
        self._counts[action] = self._counts.get(action, 0) + 1
        if not trainer.world.is_main:
            return
        if self._file is None:
            self._file = JsonLines(trainer.config.folder / RECORD)
        self._file.write(event.row(action, back_to))
        log.warning("guard: %s; %s%s", event.line, action, "" if back_to is None else f" to step {back_to}")


def _of_model(trainer: Trainer) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in trainer.tensors().items() if name.startswith("model.")}


def _short(name: str) -> str:
    return name.removeprefix("model.")
