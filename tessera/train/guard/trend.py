"""Tell divergence from spikes: the loss stays above where the run began."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from tessera.train.guard.limits import LATE

LASTING = 50  # steps in a row that make a lasting state of it
FIRST = 3  # steps whose median is where the run began
LEARNT = 0.1  # of the first loss: less is no progress that could be lost
FAR = 3.0  # times the very first loss: with far too high a learning rate the second one is so high already


class Trend:
    """Compare the level of the loss with the first one and with the best one."""

    def __init__(self) -> None:
        self.best = float("inf")
        self.lost = 0  # steps in a row at which all that was learnt is lost
        self._told = False
        self._first: list[float] = []
        self._seen = 0

    @property
    def start(self) -> float:
        return median(self._first) if self._first else 0.0

    def add(self, loss: float, level: float) -> bool:
        """Take a step's finite loss and the level that it belongs to; return whether to tell of divergence."""
        self._seen += 1
        if len(self._first) < FIRST:
            self._first.append(loss)
        if self._seen < LATE:
            return False
        learnt = self.start - self.best >= LEARNT * abs(self.start)
        # Every single loss has to be so high: a first sample that was easy by chance is not the only easy one.
        very_first = self._first[0]
        far = min(loss, level) >= very_first + (FAR - 1) * abs(very_first) and very_first != 0
        self.lost = self.lost + 1 if far or (learnt and level >= self.start) else 0
        self.best = min(self.best, level)
        self._told &= self.lost > 0
        return self.lost >= LASTING and not self._told

    def told(self) -> None:
        """Once is enough, until the loss has fallen again."""
        self._told = True

    def state(self) -> dict[str, Any]:
        best = self.best if self._seen >= LATE else None  # JSON knows no infinity
        return {"first": list(self._first), "best": best, "seen": self._seen, "lost": self.lost, "told": self._told}

    def restore(self, state: Mapping[str, Any]) -> None:
        best = state.get("best")
        self.best = float("inf") if best is None else float(best)
        self._first = [float(value) for value in state.get("first", ())]
        self._seen, self.lost = int(state.get("seen", 0)), int(state.get("lost", 0))
        self._told = bool(state.get("told", False))
