"""Find the module and the samples that made a step bad, and describe a bad step.

The step is run again and recorded (`activation_trace`), then its suspect samples one by one. All ranks do this
together. Each records activations and their gradients, which it computes itself: gradients of weights are summed over
ranks and do not show which rank spoilt them. Records of ranks that read the same data are joined.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tessera.checkpoint.collective import Ranks
from tessera.core.batch import Batch
from tessera.core.engine import Engine
from tessera.core.step_source import StepSource
from tessera.core.task import Task
from tessera.errors import TesseraError, few_names
from tessera.observe.anomaly.activation_trace import ActivationTrace, TensorRecord, trace_step
from tessera.observe.anomaly.check import AnomalyKind
from tessera.observe.anomaly.state import Damage, find_damage
from tessera.runtime.modules import clean_name

RECORD = "guard.jsonl"
MOST = 0.8  # of the excess: the samples that make up this share of it are the cause
OUTLIER = 10.0  # an output larger than for other samples by this factor is an outlier


class GuardStop(TesseraError):
    """Stop the run: it cannot go on, or the policy ends it."""

    exit_code = 3


@dataclass(frozen=True)
class BadStep:
    """Describe a bad step and its cause for the screen, `guard.jsonl` and the error that ends a run."""

    step: int  # its number, counted from 1
    kind: str
    loss: float
    grad_norm: float
    cause: Attribution | None = None  # None: not investigated
    damage: tuple[Damage, ...] = ()
    note: str = ""  # added to the description

    @property
    def line(self) -> str:
        text = f"step {self.step} is bad ({self.kind}: loss {self.loss:.4g}, gradient norm {self.grad_norm:.4g})"
        if self.damage:
            text += f": parameter {few_names([str(one) for one in self.damage])}"
        elif self.cause is not None:
            text += f": {self.cause.module}"
            if self.cause.every_sample:
                text += "; every sample of the step shows it, so no single one is to blame"
            elif self.cause.samples:
                several = "samples" if len(self.cause.samples) > 1 else "sample"
                text += f"; {'among samples' if self.cause.ambiguous else several} {few_names(self.cause.samples)}"
        return text + (f"; {self.note}" if self.note else "")

    def row(self, action: str, back_to: int | None) -> dict[str, Any]:
        cause = self.cause or Attribution("")
        return {
            "step": self.step,
            "kind": self.kind,
            "loss": _number(self.loss),
            "grad_norm": _number(self.grad_norm),
            "module": cause.module or None,
            "parameters": [{"name": d.name, "worst": _number(d.value), "count": d.count} for d in self.damage],
            "samples": list(cause.samples),
            "ambiguous": cause.ambiguous,
            "every_sample": cause.every_sample,
            "action": action,
            **({"note": self.note} if self.note else {}),
            **({} if back_to is None else {"back_to": back_to}),
        }


def _number(value: float) -> float | str:
    """Return a value that JSON can hold: it knows no nan."""
    return value if math.isfinite(value) else str(value)


@dataclass(frozen=True)
class Attribution:
    """Name the cause of a bad step."""

    module: str  # in words, with the direction
    samples: tuple[str, ...] = ()
    ambiguous: bool = False  # only some of the samples are the cause, and it is not known which
    every_sample: bool = False  # all samples of the step show it, so no single one is the cause


@dataclass(frozen=True)
class ProbeReader:
    """Read the data of this rank again, sample by sample where the step source can leave samples out."""

    source: StepSource
    data_rank: int = 0  # position on the data axis: ranks that share it read the same rows
    microbatches: int = 1  # that one step of the engine needs

    def probes(self, observed: _Observation) -> list[_Probe]:
        rows = tuple(row for row, _ in observed.rows)
        if self.source.can_leave_out:
            ids = tuple(dict.fromkeys(observed.ids))
            return [_Probe(rows, (id,), tuple(other for other in ids if other != id)) for id in ids]
        if not self.source.can_read_again:
            return []
        probes, start = [], 0
        for row, count in observed.rows:
            probes.append(_Probe((row,), observed.ids[start : start + count], ()))
            start += count
        return probes

    def read(self, probe: _Probe) -> Batch:
        return self.source.read_again(probe.rows, probe.others)


@dataclass(frozen=True)
class _Probe:
    """Describe a part of a micro-batch to run apart: its rows, with some of their samples."""

    rows: tuple[int, ...]
    ids: tuple[str, ...]
    others: tuple[str, ...]  # left out


@dataclass(frozen=True)
class _Observation:
    """Hold the observations of a micro-batch or a probe, of one rank or of all ranks that read it."""

    rows: tuple[tuple[int, int], ...] = ()
    ids: tuple[str, ...] = ()
    finite: bool = True
    loss: float = 0.0
    count: float = 0.0
    grad_sq: float = 0.0

    @staticmethod
    def of(trace: ActivationTrace, number: int, batch: Batch) -> _Observation:
        loss, count = trace.losses.get(number, (0.0, 0.0))
        return _Observation(batch.rows, batch.sample_ids, trace.finite(number), loss, count, trace.grad_sq(number))

    def joined(self, other: _Observation) -> _Observation:
        return _Observation(
            self.rows or other.rows,
            self.ids or other.ids,
            self.finite and other.finite,
            self.loss + other.loss,
            self.count + other.count,
            self.grad_sq + other.grad_sq,
        )


_Key = tuple[int, int]  # (data rank, number of a micro-batch or a probe there)


@dataclass(frozen=True)
class Attributor:
    """Run a bad step again to find its cause."""

    module: nn.Module
    engine: Engine
    task: Task
    device: torch.device
    microbatches: Sequence[Batch]
    reader: ProbeReader
    seed: Callable[[], None]  # sets the random generators to where the step began
    most_probes: int

    def attribute(self, kind: AnomalyKind, usual_loss: float) -> Attribution:
        with _buffers_kept(self.module):
            trace = self._trace(self.microbatches)
            module = self._bad_module(trace) if kind == "not finite" else None
            self.module.zero_grad(set_to_none=True)
            observed = self._join({n: _Observation.of(trace, n, batch) for n, batch in enumerate(self.microbatches)})
            suspects = [
                key for key, bad in zip(observed, _bad(list(observed.values()), kind, usual_loss), strict=True) if bad
            ]
            probed = self._probe_samples({key: observed[key] for key in suspects}, kind, usual_loss)
            every_sample = kind == "not finite" and _is_every_sample(observed.values(), probed)
        if module is None:
            guilty, others = probed.split_records(trace, suspects, self.reader.data_rank)
            module = _first_outlier_of_ranks(first_outlier(guilty, others))
        return Attribution(module, () if every_sample else probed.samples, probed.ambiguous, every_sample)

    def _trace(self, microbatches: Sequence[Batch]) -> ActivationTrace:
        self.seed()
        return trace_step(self.module, self.engine, self.task, microbatches)

    def _bad_module(self, trace: ActivationTrace) -> str:
        """Return the bad module of all ranks that is nearest to the cause, else a parameter with a bad gradient."""
        modules = [one for one in Ranks.current().on_all(lambda: first_bad(trace.records)) if one is not None]
        if modules:
            return min(modules, key=lambda one: one[0])[1]
        gradients = {clean_name(n): p.grad for n, p in self.module.named_parameters() if p.grad is not None}
        damage = find_damage(gradients, {})
        return f"gradient of {damage[0].name}" if damage else "the loss"

    def _probe_samples(self, suspects: Mapping[_Key, _Observation], kind: AnomalyKind, usual_loss: float) -> _Probed:
        """Run the samples of suspect micro-batches one by one."""
        plan: dict[int, list[_Probe]] = {}
        unprobed: list[str] = []  # samples that need no probe, or cannot be probed
        ambiguous = False
        for (data_rank, _), observation in suspects.items():
            probes = self.reader.probes(observation)
            if len(probes) < 2 or len(probes) + len(plan.get(data_rank, ())) > self.most_probes:
                unprobed += observation.ids
                ambiguous |= len(observation.ids) > 1
            else:
                plan.setdefault(data_rank, []).extend(probes)
        traces = self._run(plan)
        mine = {n: _Observation.of(one, 0, self.microbatches[0]) for n, one in traces.items()}
        observed = self._join(mine)
        bad = _bad(list(observed.values()), kind, usual_loss)
        guilty = [key for key, one in zip(observed, bad, strict=True) if one]
        samples = [*unprobed, *(name for data_rank, n in guilty for name in plan[data_rank][n].ids)]
        if plan and not guilty and kind == "not finite":  # the fault only shows with several of them
            samples += [name for probes in plan.values() for probe in probes for name in probe.ids]
            ambiguous = True
        here = {number for data_rank, number in guilty if data_rank == self.reader.data_rank}
        return _Probed(tuple(dict.fromkeys(samples)), ambiguous, traces, here)

    def _run(self, plan: Mapping[int, Sequence[_Probe]]) -> dict[int, ActivationTrace]:
        """Run the probes of this rank. All ranks run equally often; one without a probe runs its first micro-batch."""
        mine = plan.get(self.reader.data_rank, [])
        traces: dict[int, ActivationTrace] = {}
        for number in range(max((len(probes) for probes in plan.values()), default=0)):
            has_probe = number < len(mine)
            batch = self.reader.read(mine[number]).to(self.device) if has_probe else self.microbatches[0]
            trace = self._trace([batch] * self.reader.microbatches)
            self.module.zero_grad(set_to_none=True)
            if has_probe:
                traces[number] = trace
        return traces

    def _join(self, mine: Mapping[int, _Observation]) -> dict[_Key, _Observation]:
        joined: dict[_Key, _Observation] = {}
        for data_rank, observations in Ranks.current().on_all(lambda: (self.reader.data_rank, mine)):
            for number, observation in observations.items():
                joined[data_rank, number] = joined.get((data_rank, number), _Observation()).joined(observation)
        return dict(sorted(joined.items()))


@dataclass(frozen=True)
class _Probed:
    samples: tuple[str, ...]
    ambiguous: bool
    traces: Mapping[int, ActivationTrace]  # of this rank's probes
    guilty: set[int]  # numbers of the probes that show the fault

    def split_records(
        self, step: ActivationTrace, suspects: Sequence[_Key], data_rank: int
    ) -> tuple[Sequence[TensorRecord], Sequence[TensorRecord]]:
        """Return what this rank recorded of the guilty samples, and of all others."""
        batches = {number for at, number in suspects if at == data_rank}
        others = [e for e in step.records if e.microbatch not in batches]
        others += [e for n, one in self.traces.items() if n not in self.guilty for e in one.records]
        guilty = [e for n in sorted(self.guilty) for e in self.traces[n].records]
        if not self.traces:
            guilty = [e for e in step.records if e.microbatch in batches]
        return guilty, others


def _is_every_sample(observed: Iterable[_Observation], probed: _Probed) -> bool:
    """Return whether there are at least two samples, and each of them shows the fault when it is run alone."""
    names = {name for one in observed for name in one.ids}
    return len(names) > 1 and not probed.ambiguous and names == set(probed.samples)


def _bad(observed: Sequence[_Observation], kind: AnomalyKind, usual_loss: float) -> list[bool]:
    if kind == "not finite":
        return [not one.finite for one in observed]
    chosen = dominant([one.loss - usual_loss * one.count if kind == "loss spike" else one.grad_sq for one in observed])
    return [number in chosen for number in range(len(observed))]


def _first_outlier_of_ranks(module: str | None) -> str:
    modules = [one for one in Ranks.current().on_all(lambda: module) if one is not None]
    return f"forward of {modules[0]} (far larger numbers than for other samples)" if modules else "the loss"


@contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[None]:
    """Restore the buffers afterwards: a step changes some, such as the loads of experts."""
    copies = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in copies:
                buffer.copy_(before)


def first_bad(records: Sequence[TensorRecord]) -> tuple[int, str] | None:
    """Return the first module with an output that is not finite, else the first one with such a gradient.

    The number is the distance to the cause, 0 being the nearest: forward comes before backward, and a module whose
    inputs were finite, so that the fault began there, before one whose inputs were not.
    """
    for record in records:
        if record.moment == "forward" and not record.finite:
            if math.isfinite(record.before):
                return 0, f"forward of {record.module}"
            return 1, f"forward of {record.module} (its input was not finite already)"
    for record in records:
        if record.moment != "forward" and not record.finite:
            readers = [e.module for e in records if e.tensor == record.tensor and e.moment == "input"]
            got = [e for e in records if e.moment == "output" and e.microbatch == record.microbatch]
            sound = {e.module for e in got} - {e.module for e in got if not e.finite}
            makers = [name for name in readers if name in sound]
            if makers:  # the innermost module with a finite gradient of its output and a bad one of its input
                return 2, f"backward of {max(makers, key=lambda name: name.count('.'))}"
            return 3, f"backward, in what follows {record.module}"
    return None


def first_outlier(guilty: Sequence[TensorRecord], others: Sequence[TensorRecord]) -> str | None:
    """Return the first module whose outputs are much larger for the guilty samples than for all others."""
    usual: dict[str, float] = {}
    for record in others:
        if record.moment == "forward" and record.finite:
            usual[record.module] = max(usual.get(record.module, 0.0), record.largest)
    for record in guilty:
        if record.moment == "forward" and record.largest > OUTLIER * usual.get(record.module, math.inf):
            return record.module
    return None


def dominant(excess: Sequence[float]) -> list[int]:
    """Return the indices of the few values that make up most of the excess.

    The list is empty where the excess is spread over many: then no single sample is the cause.
    """
    total = math.fsum(value for value in excess if value > 0)
    if not total > 0:
        return []
    chosen: list[int] = []
    covered = 0.0
    for index in sorted(range(len(excess)), key=lambda index: -excess[index]):
        chosen.append(index)
        covered += excess[index]
        if covered >= MOST * total:
            break
    return sorted(chosen) if len(excess) == 1 or len(chosen) <= len(excess) // 2 else []
