"""From what was heard to who is to blame. Pure functions: no model, no rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tessera.train.guard.probe import Event

MOST = 0.8  # of what is too much: those that make up so much of it are to blame
UNLIKE = 10.0  # a module that gives so many times more than with other samples stands out


@dataclass(frozen=True)
class Culprit:
    """A place in the model. `origin`: what went in was in order, so that it began here."""

    text: str
    forward: bool
    origin: bool

    @property
    def order(self) -> tuple[bool, bool]:
        """Sorts those first that lie nearer to the cause."""
        return not self.forward, not self.origin


def first_bad(events: Sequence[Event]) -> Culprit | None:
    """The first module that gave something not finite; if all did well, the first that got such a gradient back."""
    for event in events:
        if event.moment == "forward" and not event.fine:
            origin = math.isfinite(event.before)
            text = f"forward of {event.module}" + ("" if origin else " (what went in was not finite already)")
            return Culprit(text, True, origin)
    for event in events:
        if event.moment != "forward" and not event.fine:
            readers = [e.module for e in events if e.tensor == event.tensor and e.moment == "input"]
            got = [e for e in events if e.moment == "output" and e.microbatch == event.microbatch]
            sound = {e.module for e in got} - {e.module for e in got if not e.fine}
            makers = [name for name in readers if name in sound]
            if makers:  # the innermost of those that got a good gradient and gave a bad one
                return Culprit(f"backward of {max(makers, key=lambda name: name.count('.'))}", False, True)
            return Culprit(f"backward, in what follows {event.module}", False, False)
    return None


def first_unlike(guilty: Sequence[Event], others: Sequence[Event]) -> str | None:
    """The first module that gave much larger numbers for the guilty than for any of the others."""
    usual: dict[str, float] = {}
    for event in others:
        if event.moment == "forward" and event.fine:
            usual[event.module] = max(usual.get(event.module, 0.0), event.largest)
    for event in guilty:
        if event.moment == "forward" and event.largest > UNLIKE * usual.get(event.module, math.inf):
            return event.module
    return None


def most_of(excess: Sequence[float]) -> list[int]:
    """Places of the few that make up most of what is too much. Empty where it is spread over many: then it is not the
    fault of single ones."""
    total = math.fsum(value for value in excess if value > 0)
    if not total > 0:
        return []
    chosen: list[int] = []
    gathered = 0.0
    for place in sorted(range(len(excess)), key=lambda place: -excess[place]):
        chosen.append(place)
        gathered += excess[place]
        if gathered >= MOST * total:
            break
    return sorted(chosen) if len(excess) == 1 or len(chosen) <= len(excess) // 2 else []
