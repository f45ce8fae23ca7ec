"""Check the loss and gradient norm of a step, and apply its update fully, clipped further, or not at all.

`RunningLimit` computes the highest usual value of a loss or a gradient norm: a single value above it is a spike.
`DivergenceDetector` detects a loss that stays above the first loss of the run.

The check runs on the device, with the same result on every rank, and the host reads the result once a step. Fused
optimizers skip the update by a flag on the device (`found_inf`, as for loss scalers). For them the update is queued
before the host reads the result, so that the device never waits for the host. Before other updates the host reads the
result. The update of a spike is clipped by the factor that the optimizer multiplies gradients with in any step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from tessera.optim.optimizer import multiply_update
from tessera.runtime import device as devices

AnomalyKind = Literal["not finite", "loss spike", "gradient spike"]
RECENT = 11  # the level of a loss or gradient norm is the median of its last 11 values
LEAST_SPREAD = 0.05  # lower bound of the usual rise of a value above its level, as a share of the level
REPEATED = 3  # a rise of at most twice the third-largest rise of the last `window` values is not a spike
IN_A_ROW = 3  # this many consecutive values above the limit are a new level, not spikes
LASTING = 50  # a loss above the run's first loss for this many steps is a divergence
FIRST = 3  # "first loss": the median of the run's first 3 losses
SOON = 5  # a loss above the run's first loss for this many steps is a likely divergence
LEARNT = 0.1  # a run has learnt something when its loss fell by this share of the first loss
FAR = 3.0  # a loss of this multiple of step 1's loss is a divergence even if the run never learnt


@dataclass(frozen=True)
class StepLimits:
    """Hold the limits for loss and gradient norm of a step, equal on every rank."""

    loss: float = math.inf  # a larger loss is a spike
    grad_norm: float = math.inf
    clip_norm: float = math.inf  # gradient norm that every step is clipped to
    clip_to: float = math.inf  # gradient norm that a spike is clipped to
    drop_spikes: bool = False  # whether the update of a spike is dropped instead of clipped


@dataclass(frozen=True)
class StepCheck:
    """Hold the result of checking a step. All ranks get an equal result, except for nan and infinite values."""

    kind: AnomalyKind | None  # None: the step is good
    applied: bool
    loss: float
    grad_norm: float


def checked_update(optimizer: Optimizer, loss: Tensor, grad_norm: Tensor, limits: StepLimits) -> StepCheck:
    """Step the optimizer if loss and gradient norm are finite on all ranks; return the result of the check.

    The update of a spike is dropped if `limits.drop_spikes` is set, otherwise clipped to `limits.clip_to`.
    """
    checked = check_step(loss, grad_norm, limits)
    not_finite, spike = checked[0], checked[1]
    look = devices.HostCopy(torch.cat([checked, torch.stack([loss.to(checked), grad_norm.to(checked)])]))
    dropped = torch.maximum(not_finite, spike) if limits.drop_spikes else not_finite
    if not limits.drop_spikes:
        _clip_further(optimizer, spike, grad_norm.to(checked), limits)
    if acts_on_flag(optimizer, dropped.device):
        step_unless(optimizer, dropped)
        numbers = look()
    else:
        numbers = look()
        if not (numbers[0] or (limits.drop_spikes and numbers[1])):
            optimizer.step()
    return _result(numbers, limits)


def _result(numbers: list[float], limits: StepLimits) -> StepCheck:
    not_finite, spike, loss, grad_norm, own_loss, own_norm = numbers
    if not_finite:
        return StepCheck("not finite", False, own_loss, own_norm)
    if not spike:
        return StepCheck(None, True, loss, grad_norm)
    return StepCheck("loss spike" if loss > limits.loss else "gradient spike", not limits.drop_spikes, loss, grad_norm)


@torch.no_grad()
def check_step(loss: Tensor, grad_norm: Tensor, limits: StepLimits) -> Tensor:
    """Return a tensor [4] on the device: (1 if loss or norm is not finite, 1 if one is a spike, loss, norm).

    Each value is the maximum over all ranks, so that all ranks decide equally.
    """
    wide = devices.sum_dtype(loss.device)
    values = torch.stack([loss.detach().to(wide), grad_norm.detach().to(device=loss.device, dtype=wide)])
    spike = (values[0] > limits.loss) | (values[1] > limits.grad_norm)
    numbers = torch.cat([torch.stack([~values.isfinite().all(), spike]).to(wide), values.nan_to_num(0.0, 0.0, 0.0)])
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    return numbers


@torch.no_grad()
def _clip_further(optimizer: Optimizer, spike: Tensor, grad_norm: Tensor, limits: StepLimits) -> None:
    """Multiply the gradients of a spike by a factor, so that their norm is at most `clip_to`."""
    if not math.isfinite(limits.clip_to):
        return
    # The optimizer clips to `clip_norm` as well, so compute the factor relative to the clipped norm.
    further = (limits.clip_to / (grad_norm.clamp(max=limits.clip_norm) + 1e-6)).clamp(max=1.0)
    further = torch.where(spike > 0, further, torch.ones_like(further))
    multiply_update(optimizer, further)


def acts_on_flag(optimizer: Optimizer, device: torch.device) -> bool:
    """Return whether the optimizer's kernels read the tensor `found_inf` on the device, as `step_unless` requires.

    Only fused kernels on an accelerator do.
    """
    if device.type == "cpu" or not all(group.get("fused") for group in optimizer.param_groups):
        return False
    return all(p.device == device for group in optimizer.param_groups for p in group["params"])


def step_unless(optimizer: Optimizer, flag: Tensor) -> None:
    """Queue an optimizer step. When it runs on the device, it changes nothing if `flag` is 1 there."""
    flagged: Any = optimizer
    flagged.found_inf = flag.float()
    try:
        optimizer.step()
    finally:
        del flagged.found_inf


class RunningLimit:
    """Compute the limit above which a loss or a gradient norm is a spike.

    The limit is computed from the level of recent values and from their usual rises above it. Spikes are included:
    otherwise, after a lasting change of level, every step would be a spike. A single value hardly changes the level
    and the limit.

    `ordinary`: values up to this are never spikes; for gradient norms, `optim.clip_norm`.
    """

    def __init__(self, factor: float | None, window: int, warmup: int, ordinary: float = 0.0) -> None:
        self.factor = factor
        self.warmup = min(warmup, window)  # at most `window` values are stored
        self.ordinary = ordinary
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._rises: deque[float] = deque(maxlen=window)
        self._highest = 0.0  # highest level since the run began

    def add(self, value: float) -> None:
        if not math.isfinite(value):
            return
        self._rises.append(max(0.0, value - self.level) if self._recent else 0.0)
        self._recent.append(value)
        if len(self._recent) == RECENT:
            self._highest = max(self._highest, abs(self.level))

    def accept_new_level(self) -> None:
        """Take the last `IN_A_ROW` values as the new level: forget earlier values, and the rises of these values."""
        newest = list(self._recent)[-IN_A_ROW:]
        self._recent.clear()
        self._recent.extend(newest)
        for _ in range(min(IN_A_ROW, len(self._rises))):
            self._rises.pop()

    @property
    def level(self) -> float:
        return median(self._recent) if self._recent else 0.0

    @property
    def limit(self) -> float:
        """Return the highest value that is not a spike; infinity during the first `warmup` values."""
        if self.factor is None or len(self._rises) < self.warmup:
            return math.inf
        ordered = sorted(self._rises)
        usual = ordered[math.ceil(0.9 * len(ordered)) - 1]
        level = abs(self.level)
        # As a loss falls, its noise falls less. So the limit also depends on the highest level of the run.
        scale = max(math.sqrt(level * max(level, self._highest)), self.ordinary)
        above = max(self.factor * max(usual, LEAST_SPREAD * scale), 2 * ordered[-REPEATED:][0], 1e-12)
        return max(self.level, self.ordinary) + above

    def state(self) -> dict[str, Any]:
        return {"recent": list(self._recent), "rises": list(self._rises), "highest": self._highest}

    def restore(self, state: Mapping[str, Any]) -> None:
        values: Sequence[float]
        for window, values in ((self._recent, state.get("recent", ())), (self._rises, state.get("rises", ()))):
            window.clear()
            window.extend(map(float, values))
        self._highest = float(state.get("highest", 0.0))


class DivergenceDetector:
    """Detect a divergence: the loss fell below the run's first loss, then rises above it and stays there.

    A loss that stays far above that of step 1 is a divergence even if it never fell.
    """

    def __init__(self) -> None:
        self.best = float("inf")
        self.lost = 0  # number of steps in a row with a loss above the first loss of the run
        self._reported = False
        self._first: list[float] = []
        self._count = 0

    @property
    def start(self) -> float:
        return median(self._first) if self._first else 0.0

    @property
    def diverging(self) -> bool:
        """Return whether a divergence is likely: the loss has been above the run's first loss for `SOON` steps."""
        return self.lost >= SOON

    def add(self, loss: float, level: float) -> bool:
        """Add the finite loss of a step and the current level of the loss; return whether to report a divergence."""
        self._count += 1
        if len(self._first) < FIRST:
            self._first.append(loss)
        if self._count < RECENT:
            return False
        learnt = self.start - self.best >= LEARNT * abs(self.start)
        # The batch of step 1 may have been easy by chance, so both loss and level must be far above its loss.
        very_first = self._first[0]
        far = min(loss, level) >= very_first + (FAR - 1) * abs(very_first) and very_first != 0
        self.lost = self.lost + 1 if far or (learnt and level >= self.start) else 0
        self.best = min(self.best, level)
        self._reported &= self.lost > 0
        return self.lost >= LASTING and not self._reported

    def mark_reported(self) -> None:
        """Report no further divergence until the loss has fallen below the loss of the run's first steps."""
        self._reported = True

    def state(self) -> dict[str, Any]:
        best = self.best if self._count >= RECENT else None  # `best` may be infinite before, which JSON lacks
        flags = {"lost": self.lost, "reported": self._reported}
        return {"first": list(self._first), "best": best, "count": self._count, **flags}

    def restore(self, state: Mapping[str, Any]) -> None:
        best = state.get("best")
        self.best = float("inf") if best is None else float(best)
        self._first = [float(value) for value in state.get("first", ())]
        self._count, self.lost = int(state.get("count", 0)), int(state.get("lost", 0))
        self._reported = bool(state.get("reported", False))
