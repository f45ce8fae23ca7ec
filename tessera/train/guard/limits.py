"""What is still normal: robust statistics over the good steps of late."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

LATE = 11  # steps whose median is where a value stands now: it follows a loss that falls
LEAST_SPREAD = 0.05  # of the median: numbers that hardly move are not to make spikes of small changes


class Running:
    """Where a value stands, and how far it usually rises above that.

    The spread is what the rises of the last `window` steps stay under nine times of ten: what happens now and then
    counts as normal, a fall counts as nothing, and one value, however large, moves neither median nor spread.
    """

    def __init__(self, factor: float | None, window: int, warmup: int) -> None:
        self.factor = factor
        self.warmup = warmup
        self._late: deque[float] = deque(maxlen=LATE)
        self._rises: deque[float] = deque(maxlen=window)

    def add(self, value: float) -> None:
        if not math.isfinite(value):
            return
        self._rises.append(max(0.0, value - median(self._late)) if self._late else 0.0)
        self._late.append(value)

    @property
    def middle(self) -> float:
        return median(self._late) if self._late else 0.0

    @property
    def limit(self) -> float:
        """The highest value that is no spike; infinity while too little is known."""
        if self.factor is None or len(self._rises) < self.warmup:
            return math.inf
        ordered = sorted(self._rises)
        usual = ordered[math.ceil(0.9 * len(ordered)) - 1]
        return self.middle + self.factor * max(usual, LEAST_SPREAD * abs(self.middle), 1e-12)

    def state(self) -> dict[str, list[float]]:
        return {"late": list(self._late), "rises": list(self._rises)}

    def restore(self, state: Mapping[str, Sequence[float]]) -> None:
        for kept, values in ((self._late, state.get("late", ())), (self._rises, state.get("rises", ()))):
            kept.clear()
            kept.extend(values)
