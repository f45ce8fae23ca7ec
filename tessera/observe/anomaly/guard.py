"""Check every step before its update reaches the weights, and treat bad steps by `guard.policy`.

The policies are described in docs/how-to/survive-bad-steps.md. Two rules hold for all of them except `off`:
numbers that are not finite never reach the weights, and a run that would succeed without the guard succeeds with it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from tessera.checkpoint.state import MODEL
from tessera.config.run_config import GuardSection
from tessera.core.batch import Batch
from tessera.core.callback import OptimizerStep, RewindHandle, StepOutcome, StepResult, TrainerHandle
from tessera.observe.anomaly.attribution import RECORD, Attribution, Attributor, BadStep, GuardStop
from tessera.observe.anomaly.check import (
    IN_A_ROW,
    LASTING,
    DivergenceDetector,
    RunningLimit,
    StepCheck,
    StepLimits,
    checked_update,
)
from tessera.observe.anomaly.state import Damage, find_damage, largest, restart
from tessera.runtime import rng
from tessera.runtime.collective import Ranks
from tessera.runtime.files import JsonLines, read_jsonl
from tessera.runtime.gradients import LossScale
from tessera.runtime.modules import clean_name

log = logging.getLogger("tessera")
DROPS = 3  # maximum dropped updates within `guard.window` steps; after that, updates of spikes are clipped
BACK_TO_ONE_STATE = 3  # maximum rollbacks to the same step because of damaged weights; after that, the run ends
INVESTIGATIONS = 10  # maximum searches for a cause within `guard.window` steps; each runs up to `guard.probes` probes


class Guard(OptimizerStep):
    """Apply, clip or drop the update of every step, and treat bad steps by `guard.policy`."""

    def __init__(
        self,
        settings: GuardSection,
        *,
        clip_norm: float | None = None,  # `optim.clip_norm`
        warmup: int = 0,  # warm-up steps of the learning rate: no spike is reported in them
        loss_scale: LossScale | None = None,
        data_rank: int = 0,  # position on the data axis: ranks that share it read the same rows
        microbatches: int = 1,  # number of micro-batches that one step of the engine needs
    ) -> None:
        self._loss_scale = loss_scale
        self.settings = settings
        self._data_rank, self._microbatches = data_rank, microbatches
        self.left_out: dict[str, str] = {}  # samples that are no longer trained on: reason by sample id
        self._clip_norm = math.inf if clip_norm is None else clip_norm
        self._warmup = warmup
        self._loss = RunningLimit(settings.loss_spike, settings.window, settings.warmup)
        self._norm = RunningLimit(settings.grad_spike, settings.window, settings.warmup, ordinary=clip_norm or 0.0)
        self._divergence = DivergenceDetector()
        self._spikes = 0  # number of spikes in a row
        self._not_finite = 0  # number of steps in a row with a nan or infinite loss or gradient
        self._updates = 0  # number of applied updates since the run began
        self._dropped: list[int] = []  # recent steps whose updates were dropped as spikes
        self._investigated: list[int] = []  # recent bad steps whose cause was searched for
        self._rewound: set[int] = set()  # bad steps after which the run went back to a checkpoint
        self._returns: dict[int, int] = {}  # number of rollbacks for damaged weights, by step of the checkpoint
        self._passed: set[int] = set()  # steps at which `guard.policy: stop` ended the run; a resume passes them
        self._normal: dict[str, float] = {}  # largest absolute value of each parameter when it was last checked
        self._moved = 0.0  # sum of learning rates since `_normal` was measured: limits how far weights moved
        self._never_finite: dict[str, Damage] = {}  # tensors that were not finite when the run began
        self._first_buffers: dict[str, Tensor] = {}  # copies at the start of this session: for a rollback to its start
        # Number of bad steps by action: skipped, clipped, went back, stopped, reported.
        self._counts: dict[str, int] = {}

    # ------------------------------------------------------------------------------------------ callback

    def on_start(self, trainer: TrainerHandle) -> None:
        if self.left_out and trainer.steps.can_leave_out:
            trainer.steps.leave_out(self.left_out)
        if self.settings.policy == "off":
            return
        self._never_finite = {tensor.name: tensor for tensor in find_damage(trainer.tensors(), {})}
        self._measure(trainer)
        weights = self._weights(trainer)
        buffers = {name: tensor for name, tensor in _of_model(trainer).items() if name not in weights}
        self._first_buffers = {name: buffer.detach().clone() for name, buffer in buffers.items()}
        path = trainer.config.folder / RECORD
        rows = Ranks.current().on_rank0(lambda: list(read_jsonl(path)))
        self._passed = {row["step"] for row in rows if row.get("action") == "stopped"}

    def on_step_end(self, trainer: TrainerHandle, result: StepResult) -> None:
        self._updates += result.applied

    def check_trained(self, trainer: TrainerHandle) -> None:
        """Raise if every update of the run was dropped for values that are not finite, except float16 overflows."""
        if self._updates or not self._not_finite or trainer.stop_reason is not None:  # a stopped run can be resumed
            return
        raise GuardStop(
            f"nothing was trained: the update of every step up to step {trainer.step} was skipped, because its loss or "
            "gradient was not finite",
            where=str(trainer.config.folder / RECORD),
            fix="read this file: it names module and samples of each step. Check the data (`tessera data doctor`) and "
            "precomputed features, then train again",
            code="run.nothing-trained",
        )

    def on_error(self, trainer: TrainerHandle, error: BaseException) -> None:
        self.on_end(trainer)

    def on_end(self, trainer: TrainerHandle) -> None:
        if self._counts and trainer.world.is_main:
            done = ", ".join(f"{action} {count}" for action, count in sorted(self._counts.items()))
            log.info("guard: bad steps: %s (%s)", done, trainer.config.folder / RECORD)
            self._counts = {}

    def state_dict(self) -> dict[str, Any]:
        return {
            "left_out": dict(self.left_out),
            "loss": self._loss.state(),
            "norm": self._norm.state(),
            "trend": self._divergence.state(),
            "spikes": self._spikes,
            "updates": self._updates,
            "dropped": list(self._dropped),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the statistics. Samples that are excluded now stay excluded: a rollback does not read them again."""
        self.left_out = {**state.get("left_out", {}), **self.left_out}
        self._loss.restore(state.get("loss", {}))
        self._norm.restore(state.get("norm", {}))
        self._divergence.restore(state.get("trend", {}))
        self._spikes = int(state.get("spikes", 0))
        # Checkpoints of earlier versions lack the key; assume that updates were applied.
        self._updates = int(state.get("updates", bool(state)))
        self._not_finite = 0  # after a resume, `guard.limit` counts bad steps from 0
        self._dropped = list(state.get("dropped", []))
        if state.get("lr_share", 1.0) < 1.0:  # earlier versions halved the learning rate after a divergence
            log.warning(
                "guard: this run had trained at %g times optim.lr since a divergence; lower optim.lr by that factor",
                state["lr_share"],
            )

    # ------------------------------------------------------------------------------------------ one step

    def update(
        self, trainer: RewindHandle, loss: Tensor, grad_norm: Tensor, microbatches: Sequence[Batch]
    ) -> StepOutcome:
        off = self.settings.policy == "off"
        if off and self._loss_scale is None:
            return super().update(trainer, loss, grad_norm, microbatches)
        limits = StepLimits() if off else self._limits(trainer.step + 1)
        check = checked_update(trainer.optimizer, loss, grad_norm, limits)
        if check.kind == "not finite" and self._loss_scale is not None and self._loss_scale.explains(check.loss):
            return "dropped"  # an overflow of float16: the loss scale has been lowered
        if off:
            return "applied" if check.applied else "dropped"
        if check.kind == "not finite":
            return self._on_not_finite(trainer, check, microbatches)
        self._not_finite = 0
        if check.applied:
            self._moved += max(float(group["lr"]) for group in trainer.optimizer.param_groups)
        self._loss.add(check.loss)
        self._norm.add(check.grad_norm)
        diverged = self._divergence.add(check.loss, self._loss.level)
        if check.kind is not None:
            return self._on_spike(trainer, check, microbatches)
        self._spikes = 0
        if diverged:
            return self._on_divergence(trainer, check)
        # Check the weights every `guard.window` steps, and before each checkpoint: a rollback needs sound checkpoints.
        step, rows = trainer.step + 1, trainer.rows_drawn + trainer.length.rows_per_step
        saves = trainer.length.due(trainer.config.checkpoint.interval, step, rows)
        if saves or step % self.settings.window == 0:
            return self._check_weights(trainer, check)
        return "applied"

    def _limits(self, step: int) -> StepLimits:
        if step <= self._warmup:
            return StepLimits()
        usual = self._norm.level
        drop = self.settings.policy != "clip" and self._spikes < IN_A_ROW - 1 and self._drops_left(step)
        if self.settings.policy == "stop":
            drop = step not in self._passed
        clip_to = min(self._clip_norm, usual) if usual > 0 else self._clip_norm
        return StepLimits(self._loss.limit, self._norm.limit, self._clip_norm, clip_to, drop)

    def _drops_left(self, step: int) -> bool:
        self._dropped = [at for at in self._dropped if step - at < self.settings.window]
        return len(self._dropped) < DROPS

    def _on_not_finite(self, trainer: RewindHandle, check: StepCheck, microbatches: Sequence[Batch]) -> StepOutcome:
        self._not_finite += 1
        bad_step = self._describe(trainer, check, microbatches)
        if bad_step.damage:
            return self._on_damage(trainer, bad_step)
        self._stop_if_asked(trainer, bad_step)
        if self._not_finite > self.settings.limit:
            self._record(trainer, bad_step, "stopped")
            raise self._too_many(trainer, bad_step)
        if self._go_back_without_samples(trainer, bad_step):
            return "rewound"
        self._record(trainer, bad_step, "skipped")
        return "dropped"

    def _on_spike(self, trainer: RewindHandle, check: StepCheck, microbatches: Sequence[Batch]) -> StepOutcome:
        self._spikes += 1
        bad_step = self._describe(trainer, check, microbatches)
        if bad_step.damage:
            return self._on_damage(trainer, bad_step)
        self._stop_if_asked(trainer, bad_step)
        if self._go_back_without_samples(trainer, bad_step):
            return "rewound"
        if self._spikes >= IN_A_ROW:
            self._loss.accept_new_level()
            self._norm.accept_new_level()
            self._spikes = 0
            level = f"{IN_A_ROW} in a row: loss {self._loss.level:.4g}, gradient norm {self._norm.level:.4g} is the"
            bad_step = replace(bad_step, note=f"{level} level from now on; if it does not fall again, lower optim.lr")
        if check.applied:
            self._record(trainer, bad_step, "clipped")
            return "applied"
        self._dropped.append(bad_step.step)
        self._record(trainer, bad_step, "skipped")
        return "dropped"

    def _on_divergence(self, trainer: RewindHandle, check: StepCheck) -> StepOutcome:
        self._divergence.mark_reported()
        began, best = self._divergence.start, self._divergence.best
        note = (
            f"training diverges: for {LASTING} steps the loss has been above the {began:.4g} that it began with (its "
            f"best level was {best:.4g}); unless the data changed, go back to an earlier checkpoint and lower optim.lr "
            f"(now {trainer.config.optim.lr:g}) or lengthen optim.schedule.warmup"
        )
        bad_step = BadStep(trainer.step + 1, "diverged", check.loss, check.grad_norm, note=note)
        self._stop_if_asked(trainer, bad_step)
        self._record(trainer, bad_step, "reported")
        return "applied"

    def _check_weights(self, trainer: RewindHandle, check: StepCheck) -> StepOutcome:
        """Search the weights for damage. If there is none, store the largest value of each for the next search."""
        damage = self._damage(trainer)
        if damage:
            bad_step = BadStep(trainer.step + 1, "damaged", check.loss, check.grad_norm, damage=tuple(damage))
            return self._on_damage(trainer, bad_step)
        self._measure(trainer)
        return "applied"

    # ------------------------------------------------------------------------------------------ finding the cause

    def _describe(self, trainer: TrainerHandle, check: StepCheck, microbatches: Sequence[Batch]) -> BadStep:
        with trainer.paused("looking for the cause of bad numbers"):
            damage = self._damage(trainer)
            if check.kind == "not finite" and not damage:
                weights = _parameter_names(trainer)
                damage = [_short(tensor) for name, tensor in self._never_finite.items() if name in weights]
            step = trainer.step + 1
            bad_step = BadStep(step, str(check.kind), check.loss, check.grad_norm, damage=tuple(damage))
            if damage or not self._should_investigate(check, step):
                return bad_step
            trainer.optimizer.zero_grad(set_to_none=True)
            return replace(bad_step, cause=self._investigate(trainer, check, microbatches))

    def _should_investigate(self, check: StepCheck, step: int) -> bool:
        """Return whether to search for the cause of a bad step, by `guard.blame` and the number of recent searches.

        A diverging run is not investigated: the sample with the largest values overflows first, but is not the cause.
        """
        if self._divergence.diverging and self.settings.blame != "always":
            return False
        self._investigated = [at for at in self._investigated if abs(step - at) < self.settings.window]
        wanted = self.settings.blame == "always" or (
            self.settings.blame == "auto"
            and (check.kind == "not finite" or self.settings.policy in ("rollback", "stop"))
        )
        ends = self._not_finite > self.settings.limit  # the run ends, and its error names the cause
        if not wanted or (len(self._investigated) >= INVESTIGATIONS and not ends):
            return False
        self._investigated.append(step)
        return True

    def _investigate(self, trainer: TrainerHandle, check: StepCheck, microbatches: Sequence[Batch]) -> Attribution:
        settings = trainer.config.train
        attributor = Attributor(
            trainer.module,
            trainer.engine,
            trainer.task,
            trainer.world.device,
            microbatches,
            trainer.steps,
            self._data_rank,
            self._microbatches,
            seed=lambda: rng.seed_process(settings.seed, "step", trainer.step, trainer.world.rank),
            most_probes=self.settings.probes,
        )
        assert check.kind is not None
        return attributor.attribute(check.kind, self._loss.level)

    def _damage(self, trainer: TrainerHandle) -> list[Damage]:
        tensors = {name: tensor for name, tensor in trainer.tensors().items() if name not in self._never_finite}
        return [_short(tensor) for tensor in find_damage(tensors, self._normal, self._moved)]

    def _measure(self, trainer: TrainerHandle) -> None:
        self._normal, self._moved = largest(self._weights(trainer)), 0.0

    def _weights(self, trainer: TrainerHandle) -> dict[str, Tensor]:
        """Return the parameters to search for damage, without buffers, which may grow by any factor."""
        names = _parameter_names(trainer) - self._never_finite.keys()
        return {name: tensor for name, tensor in _of_model(trainer).items() if name in names}

    # ------------------------------------------------------------------------------------------ policies

    def _stop_if_asked(self, trainer: TrainerHandle, bad_step: BadStep) -> None:
        """End the run under `policy: stop`, unless it was resumed after a stop at the same step."""
        if self.settings.policy != "stop" or bad_step.step in self._passed:
            return
        self._record(trainer, bad_step, "stopped")
        if bad_step.kind != "diverged" and trainer.config.checkpoint.at_end:
            trainer.save()  # the bad update was not applied
        raise GuardStop(
            bad_step.line,
            where="guard.policy=stop",
            fix=f"`tessera resume {trainer.config.folder}` continues after this step; guard.policy=clip does not stop",
            code="run.bad-step",
        )

    def _too_many(self, trainer: TrainerHandle, bad_step: BadStep) -> GuardStop:
        what = f"{self._not_finite} steps in a row were not finite (guard.limit={self.settings.limit}); the last: "
        if self._divergence.diverging or (bad_step.cause is not None and bad_step.cause.every_sample):
            # Do not save: the new checkpoint could push out an older one with better weights.
            fix = (
                f"the run has diverged, or all data is bad: lower optim.lr (now {trainer.config.optim.lr:g}), begin "
                f"from an earlier checkpoint, and check the inputs; {trainer.config.folder / RECORD} lists each step"
            )
            return GuardStop(what + bad_step.line, where="guard.limit", fix=fix, code="run.diverged")
        if trainer.config.checkpoint.at_end:
            trainer.save()
        fix = f"{trainer.config.folder / RECORD} names module and samples of each step: correct the data or the model"
        return GuardStop(what + bad_step.line, where="guard.limit", fix=fix, code="run.not-finite")

    def _on_damage(self, trainer: RewindHandle, bad_step: BadStep) -> StepOutcome:
        self._stop_if_asked_for_damage(trainer, bad_step)
        self._rewound.add(bad_step.step)
        self._go_back(trainer)
        self._returns[trainer.step] = self._returns.get(trainer.step, 0) + 1
        self._continue_after_rollback(trainer, bad_step)
        return "rewound"

    def _go_back(self, trainer: RewindHandle) -> None:
        """Load the newest checkpoint without damaged weights; if none exists, restart from the initial weights."""
        with trainer.paused("going back to a good state"):
            trainer.optimizer.zero_grad(set_to_none=True)
            before: int | None = None
            while trainer.resume(before):
                if not self._damage(trainer):
                    return
                before = trainer.step  # the loaded checkpoint has damaged weights, too: try an older one
            restart(trainer, self._first_buffers)

    def _stop_if_asked_for_damage(self, trainer: TrainerHandle, bad_step: BadStep) -> None:
        """End the run under `policy: stop`, or if a rollback cannot help.

        It cannot if the weights were damaged when the run began, or if the damage has occurred again after a rollback.
        """
        stop: GuardStop | None = None
        where = f"guard.policy={self.settings.policy}"
        damaged = [tensor.name for tensor in bad_step.damage]
        if any(name in self._never_finite for name in (*damaged, *(f"{MODEL}{name}" for name in damaged))):
            fix = "they were not finite when the run began: check the folder or checkpoint that they were loaded from"
            stop = GuardStop(bad_step.line, where=where, fix=fix, code="weights.not-finite")
        elif bad_step.step in self._rewound or max(self._returns.values(), default=0) >= BACK_TO_ONE_STATE:
            fix = (
                "the damage returned after a rollback, so it is no flipped bit: check code that writes into the "
                "weights, and the device"
            )
            stop = GuardStop(bad_step.line, where=where, fix=fix, code="run.damage-returns")
        elif self.settings.policy == "stop":
            fix = f"`tessera resume {trainer.config.folder}` goes on from the last checkpoint"
            stop = GuardStop(bad_step.line, where=where, fix=fix, code="run.weights-damaged")
        if stop is not None:
            self._record(trainer, bad_step, "stopped")
            raise stop

    def _go_back_without_samples(self, trainer: RewindHandle, bad_step: BadStep) -> bool:
        """Under `policy: rollback`, go back and leave out the bad samples: once per step, if the data allows it."""
        if (
            self.settings.policy != "rollback"
            or bad_step.step in self._rewound
            or not self._leave_out(trainer, bad_step)
        ):
            return False
        self._rewound.add(bad_step.step)
        self._go_back(trainer)
        self._continue_after_rollback(trainer, bad_step)
        return True

    def _leave_out(self, trainer: TrainerHandle, bad_step: BadStep) -> bool:
        cause = bad_step.cause
        if cause is None or not cause.samples or cause.ambiguous:
            return False
        reason = f"bad numbers in step {bad_step.step} ({bad_step.kind}, {cause.module})"
        samples = dict.fromkeys(cause.samples, reason)
        if all(name in self.left_out for name in samples) or not trainer.steps.can_leave_out:
            return False
        self.left_out.update(samples)
        trainer.steps.leave_out(samples)
        return True

    def _continue_after_rollback(self, trainer: RewindHandle, bad_step: BadStep) -> None:
        self._spikes = self._not_finite = 0
        self._record(trainer, bad_step, "went back", trainer.step)
        trainer.continue_from_here()

    def _record(self, trainer: TrainerHandle, bad_step: BadStep, action: str, back_to: int | None = None) -> None:
        self._counts[action] = self._counts.get(action, 0) + 1
        if not trainer.world.is_main:
            return
        record = JsonLines(trainer.config.folder / RECORD)
        record.write(bad_step.row(action, back_to))
        record.close()
        log.warning("guard: %s; %s%s", bad_step.line, action, "" if back_to is None else f" to step {back_to}")


def _of_model(trainer: TrainerHandle) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in trainer.tensors().items() if name.startswith(MODEL)}


def _parameter_names(trainer: TrainerHandle) -> set[str]:
    return {f"{MODEL}{clean_name(name)}" for name, _ in trainer.module.named_parameters()}


def _short(damage: Damage) -> Damage:
    return replace(damage, name=damage.name.removeprefix(MODEL))
