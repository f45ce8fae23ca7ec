"""Tell which values of the loss and of the gradient norm are still normal, from the values of late."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

LATE = 11  # the level is the median of so many values: it follows a loss that falls, and one value does not move it
LEAST_SPREAD = 0.05  # of the level: small changes of a value that hardly moves are not spikes
HAPPENS = 3  # what happened so often within the window may happen again, twice as high: it is no spike
IN_A_ROW = 3  # so many values in a row above the limit are a new level, not a spike


class Running:
    """Follow the level of a value and how far it usually rises above that level.

    Every finite value counts, also one that was a spike: what is left out of the statistics can never become normal,
    and then each following step is a spike too. One value moves neither the level nor the limit.

    `ordinary`: values up to this are never spikes (for gradient norms: what clipping lets through unchanged).
    """

    def __init__(self, factor: float | None, window: int, warmup: int, ordinary: float = 0.0) -> None:
        self.factor = factor
        self.warmup = min(warmup, window)  # more is never known
        self.ordinary = ordinary
        self._late: deque[float] = deque(maxlen=LATE)
        self._rises: deque[float] = deque(maxlen=window)
        self._highest = 0.0  # the highest level that the run had

    def add(self, value: float) -> None:
        if not math.isfinite(value):
            return
        self._rises.append(max(0.0, value - self.level) if self._late else 0.0)
        self._late.append(value)
        if len(self._late) == LATE:
            self._highest = max(self._highest, abs(self.level))

    def accept_new_level(self) -> None:
        """Take the last values as where the value stands from now on, and not as rises that happen now and then."""
        newest = list(self._late)[-IN_A_ROW:]
        self._late.clear()
        self._late.extend(newest)
        for _ in range(min(IN_A_ROW, len(self._rises))):
            self._rises.pop()

    @property
    def level(self) -> float:
        return median(self._late) if self._late else 0.0

    @property
    def limit(self) -> float:
        """The highest value that is no spike; infinity while too little is known."""
        if self.factor is None or len(self._rises) < self.warmup:
            return math.inf
        ordered = sorted(self._rises)
        usual = ordered[math.ceil(0.9 * len(ordered)) - 1]
        level = abs(self.level)
        # Noise does not shrink as fast as the loss does: a loss of 0.01 that was 6 once is judged less strictly.
        scale = max(math.sqrt(level * max(level, self._highest)), self.ordinary)
        above = max(self.factor * max(usual, LEAST_SPREAD * scale), 2 * ordered[-HAPPENS:][0], 1e-12)
        return max(self.level, self.ordinary) + above

    def state(self) -> dict[str, Any]:
        return {"late": list(self._late), "rises": list(self._rises), "highest": self._highest}

    def restore(self, state: Mapping[str, Any]) -> None:
        values: Sequence[float]
        for kept, values in ((self._late, state.get("late", ())), (self._rises, state.get("rises", ()))):
            kept.clear()
            kept.extend(values)
        self._highest = float(state.get("highest", 0.0))
