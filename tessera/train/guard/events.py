"""One bad step in words: for the screen, for `guard.jsonl`, and for the error that ends a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tessera.core.errors import TesseraError
from tessera.train.guard.blame import Blame
from tessera.train.guard.damage import Damage

RECORD = "guard.jsonl"
_SHOWN = 8  # names in a line


class GuardStop(TesseraError):
    """The run cannot go on, or the policy is to stop."""

    exit_code = 3


@dataclass(frozen=True)
class Event:
    """One bad step: what was seen, and what is known of the cause."""

    step: int  # its number, counted from 1
    kind: str
    loss: float
    grad_norm: float
    blame: Blame | None = None  # None: nobody was asked
    damage: tuple[Damage, ...] = ()
    note: str = ""  # what else there is to say

    @property
    def line(self) -> str:
        text = f"step {self.step} is bad ({self.kind}: loss {self.loss:.4g}, gradient norm {self.grad_norm:.4g})"
        if self.damage:
            text += f": parameter {_few([str(one) for one in self.damage])}"
        elif self.blame is not None:
            text += f": {self.blame.module}"
            if self.blame.everyone:
                text += "; every sample of the step shows it, so no single one is to blame"
            elif self.blame.samples:
                several = "samples" if len(self.blame.samples) > 1 else "sample"
                text += f"; {'among samples' if self.blame.together else several} {_few(self.blame.samples)}"
        return text + (f"; {self.note}" if self.note else "")

    def row(self, action: str, back_to: int | None) -> dict[str, Any]:
        blame = self.blame or Blame("")
        return {
            "step": self.step,
            "kind": self.kind,
            "loss": _number(self.loss),
            "grad_norm": _number(self.grad_norm),
            "module": blame.module or None,
            "parameters": [{"name": d.name, "worst": _number(d.value), "count": d.count} for d in self.damage],
            "samples": list(blame.samples),
            "told_apart": not blame.together,
            "every_sample": blame.everyone,
            "action": action,
            **({"note": self.note} if self.note else {}),
            **({} if back_to is None else {"back_to": back_to}),
        }


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _number(value: float) -> float | str:
    """JSON knows no nan."""
    return value if math.isfinite(value) else str(value)
