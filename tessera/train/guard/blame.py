"""Which module and which samples made a step bad: the step is run again, then what is suspect in it, sample by sample.

All ranks go through this together. Each looks at what it computes itself (activations and their gradients; gradients of
weights are summed over ranks and do not tell who spoilt them), and what they saw is joined by what they read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from tessera.checkpoint.ranks import Ranks
from tessera.core.names import clean
from tessera.core.types import Batch, RowSource, SparingRows, Task
from tessera.parallel.engine import Engine
from tessera.train.guard.check import Kind
from tessera.train.guard.damage import find_damage
from tessera.train.guard.probe import Event, Heard, listen
from tessera.train.guard.suspects import first_bad, first_unlike, most_of

APART = "run apart"  # why samples are left out of a probe


@dataclass(frozen=True)
class Blame:
    module: str  # in words, with the direction
    samples: tuple[str, ...] = ()
    together: bool = False  # the samples could not be told apart: some of them are to blame
    everyone: bool = False  # every sample of the step showed it: it is not the fault of single ones


@dataclass(frozen=True)
class Reader:
    """How data reaches this rank."""

    source: RowSource
    place: int = 0  # ranks at one place read the same rows
    step_needs: int = 1  # micro-batches that the engine insists on

    def probes(self, seen: _Seen) -> list[_Probe]:
        rows = tuple(row for row, _ in seen.rows)
        if isinstance(self.source, SparingRows) and self.source.without({}) is not None:
            ids = tuple(dict.fromkeys(seen.ids))
            return [_Probe(rows, (one,), tuple(other for other in ids if other != one)) for one in ids]
        found, at = [], 0
        for row, count in seen.rows:
            found.append(_Probe((row,), seen.ids[at : at + count], ()))
            at += count
        return found

    def make(self, probe: _Probe) -> Batch:
        source: RowSource | None = self.source
        if probe.others:
            assert isinstance(self.source, SparingRows)
            source = self.source.without(dict.fromkeys(probe.others, APART))
        assert source is not None
        return source.batch(probe.rows)


@dataclass(frozen=True)
class _Probe:
    """Rows of a micro-batch with some of their samples."""

    rows: tuple[int, ...]
    ids: tuple[str, ...]
    others: tuple[str, ...]  # left out


@dataclass(frozen=True)
class _Seen:
    """A micro-batch or a probe, as one rank saw it, or all that read it."""

    rows: tuple[tuple[int, int], ...] = ()
    ids: tuple[str, ...] = ()
    fine: bool = True
    loss: float = 0.0
    count: float = 0.0
    pull: float = 0.0

    @staticmethod
    def of(heard: Heard, number: int, batch: Batch) -> _Seen:
        loss, count = heard.losses.get(number, (0.0, 0.0))
        return _Seen(batch.rows, batch.sample_ids, heard.fine(number), loss, count, heard.pull(number))

    def joined(self, other: _Seen) -> _Seen:
        return _Seen(
            self.rows or other.rows,
            self.ids or other.ids,
            self.fine and other.fine,
            self.loss + other.loss,
            self.count + other.count,
            self.pull + other.pull,
        )


_Key = tuple[int, int]  # (place, number of a micro-batch or a probe there)


@dataclass(frozen=True)
class Investigation:
    module: nn.Module
    engine: Engine
    task: Task
    device: torch.device
    microbatches: Sequence[Batch]
    reader: Reader
    seed: Callable[[], None]  # puts the random streams where the step began
    most_probes: int

    def blame(self, kind: Kind, usual_loss: float) -> Blame:
        with _buffers_kept(self.module):
            heard = self._listen(self.microbatches)
            culprit = self._culprit(heard) if kind == "not finite" else None
            self.module.zero_grad(set_to_none=True)
            seen = self._join({n: _Seen.of(heard, n, batch) for n, batch in enumerate(self.microbatches)})
            suspects = [key for key, bad in zip(seen, _bad(list(seen.values()), kind, usual_loss), strict=True) if bad]
            apart = self._apart({key: seen[key] for key in suspects}, kind, usual_loss)
            everyone = kind == "not finite" and _all_of(seen.values(), apart)
        if culprit is None:
            guilty, others = apart.guilty_events(heard, suspects, self.reader.place)
            culprit = _first_told(first_unlike(guilty, others))
        return Blame(culprit, () if everyone else apart.samples, apart.together, everyone)

    def _listen(self, microbatches: Sequence[Batch]) -> Heard:
        self.seed()
        return listen(self.module, self.engine, self.task, microbatches)

    def _culprit(self, heard: Heard) -> str:
        """Of all ranks' first bad modules the one nearest to the cause; where all did well, a gradient that did not."""
        told = [one for one in Ranks.current().each(lambda: first_bad(heard.events)) if one is not None]
        if told:
            return min(told, key=lambda one: one.order).text
        gradients = {clean(n): p.grad for n, p in self.module.named_parameters() if p.grad is not None}
        found = find_damage(gradients, {})
        return f"gradient of {found[0].name}" if found else "the loss"

    # ------------------------------------------------------------------------------------------ samples apart

    def _apart(self, suspects: Mapping[_Key, _Seen], kind: Kind, usual_loss: float) -> _Apart:
        plan: dict[int, list[_Probe]] = {}
        known: list[str] = []  # samples that need no probe, or cannot be probed
        together = False
        for (place, _), one in suspects.items():
            probes = self.reader.probes(one)
            if len(probes) < 2 or len(probes) + len(plan.get(place, ())) > self.most_probes:
                known += one.ids
                together |= len(one.ids) > 1
            else:
                plan.setdefault(place, []).extend(probes)
        heard = self._run(plan)
        mine = {n: _Seen.of(one, 0, self.microbatches[0]) for n, one in heard.items()}
        seen = self._join(mine)
        bad = _bad(list(seen.values()), kind, usual_loss)
        guilty = [key for key, one in zip(seen, bad, strict=True) if one]
        samples = [*known, *(name for place, n in guilty for name in plan[place][n].ids)]
        if plan and not guilty and kind == "not finite":  # only together they go wrong
            samples += [name for probes in plan.values() for probe in probes for name in probe.ids]
            together = True
        return _Apart(tuple(dict.fromkeys(samples)), together, heard, {n for p, n in guilty if p == self.reader.place})

    def _run(self, plan: Mapping[int, Sequence[_Probe]]) -> dict[int, Heard]:
        """This rank's probes. All ranks run equally often; one with no probe left runs what it has."""
        mine = plan.get(self.reader.place, [])
        found: dict[int, Heard] = {}
        for number in range(max((len(probes) for probes in plan.values()), default=0)):
            ours = number < len(mine)
            batch = self.reader.make(mine[number]).to(self.device) if ours else self.microbatches[0]
            heard = self._listen([batch] * self.reader.step_needs)
            self.module.zero_grad(set_to_none=True)
            if ours:
                found[number] = heard
        return found

    def _join(self, mine: Mapping[int, _Seen]) -> dict[_Key, _Seen]:
        found: dict[_Key, _Seen] = {}
        for place, told in Ranks.current().each(lambda: (self.reader.place, mine)):
            for number, one in told.items():
                found[place, number] = found.get((place, number), _Seen()).joined(one)
        return dict(sorted(found.items()))


@dataclass(frozen=True)
class _Apart:
    samples: tuple[str, ...]
    together: bool
    heard: Mapping[int, Heard]  # this rank's probes
    guilty: set[int]  # those of them that showed it

    def guilty_events(
        self, whole: Heard, suspects: Sequence[_Key], place: int
    ) -> tuple[Sequence[Event], Sequence[Event]]:
        """What this rank heard of the guilty, and of all others."""
        batches = {number for at, number in suspects if at == place}
        others = [e for e in whole.events if e.microbatch not in batches]
        others += [e for n, one in self.heard.items() if n not in self.guilty for e in one.events]
        guilty = [e for n in sorted(self.guilty) for e in self.heard[n].events]
        if not self.heard:
            guilty = [e for e in whole.events if e.microbatch in batches]
        return guilty, others


def _all_of(seen: Iterable[_Seen], apart: _Apart) -> bool:
    """Whether each of at least two samples, run apart from the others, showed it."""
    names = {name for one in seen for name in one.ids}
    return len(names) > 1 and not apart.together and names == set(apart.samples)


def _bad(seen: Sequence[_Seen], kind: Kind, usual_loss: float) -> list[bool]:
    if kind == "not finite":
        return [not one.fine for one in seen]
    chosen = most_of([one.loss - usual_loss * one.count if kind == "loss spike" else one.pull for one in seen])
    return [number in chosen for number in range(len(seen))]


def _first_told(module: str | None) -> str:
    told = [one for one in Ranks.current().each(lambda: module) if one is not None]
    return f"forward of {told[0]} (far larger numbers than for other samples)" if told else "the loss"


@contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[None]:
    """What a step changes besides weights (loads of experts) is as it was, however often it is run."""
    kept = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in kept:
                buffer.copy_(before)
