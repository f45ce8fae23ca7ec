"""How many worker processes a run needs: as many as keep the wait for data small, found while it runs."""

from __future__ import annotations

import math
import os
from pathlib import Path

WAIT = 0.02  # share of a step that may be spent in waiting
_WINDOW = 8  # steps that are judged together
_LONG_S = 2.0  # so much waiting is enough to judge by
_WORTH_S = 5.0  # what processes must save in all to be begun
_UNSETTLED = 2  # steps that say nothing: the first ones, and those after a change
_WINDOWS = 8  # judged at most


class Tuner:
    """`workers` is the number to have. Begins with `first`, or none: what costs next to nothing needs no process."""

    def __init__(self, cpus: int, micro_batches: int, steps: int | None = None, first: int = 0) -> None:
        self.workers = first
        self.settled = False
        self.batch_seconds = 0.0  # to make one, in the training process
        self.step_seconds = 0.0  # without the wait for data
        self._cpus = max(1, cpus)
        self._micro_batches = micro_batches
        self._left = math.inf if steps is None else float(steps)
        self._windows = 0
        self._unsettled = _UNSETTLED
        self._restart()

    def saw(self, waited: float, elapsed: float) -> None:
        """One step: seconds from the step before to this one, of which `waited` for data."""
        self._left -= 1
        if self._unsettled and (self.workers or waited < _LONG_S):
            self._unsettled -= 1
            return
        self._steps += 1
        self._waited += waited
        self._elapsed += elapsed
        if self._steps >= _WINDOW or self._waited >= _LONG_S:
            self._judge()

    def _judge(self) -> None:
        waiting = self._waited / self._steps
        computing = max(self._elapsed - self._waited, 1e-9) / self._steps
        if self.workers == 0:
            self.batch_seconds = waiting / self._micro_batches
        self.step_seconds = computing
        too_long = waiting - WAIT * (waiting + computing)
        self._windows += 1
        if (
            too_long <= 0
            or self.workers == self._cpus
            or self._windows == _WINDOWS
            or (self.workers == 0 and too_long * self._left < _WORTH_S)
        ):
            self.settled = True
            return
        if self.workers == 0:
            needed = 1.25 * waiting / computing
        else:  # so many made a step's batches in all of its time
            needed = self.workers * (waiting + computing) / computing
        self.workers = int(min(self._cpus, max(self.workers + 1, math.ceil(needed))))
        self._unsettled = _UNSETTLED
        self._restart()

    def _restart(self) -> None:
        self._steps, self._waited, self._elapsed = 0, 0.0, 0.0

    def describe(self) -> str:
        count = {0: "no worker processes", 1: "1 worker"}.get(self.workers, f"{self.workers} workers")
        batch = f"a batch takes {_ms(self.batch_seconds)}, " if self.batch_seconds else ""
        return f"loader: {count} ({batch}a step {_ms(self.step_seconds)})"


def usable_cpus(ranks_here: int = 1) -> int:
    """Worker processes that one of the ranks on this machine may have: its share of the processors, less its own."""
    cpus = float(len(os.sched_getaffinity(0)))
    try:  # a container's share of the machine
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        cpus = min(cpus, int(quota) / int(period))
    except (OSError, ValueError):  # none, or "max"
        pass
    return max(1, int(cpus / ranks_here) - 1)


def _ms(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 0.9995 else f"{seconds * 1e3:.3g} ms"
