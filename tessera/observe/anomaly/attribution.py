"""Find the module and the samples that made a step bad, and describe a bad step.

The step is run again with hooks (`activation_trace`), then the samples of bad micro-batches one by one. All ranks do
this together. Each rank records its own activations and their gradients. Gradients of weights would not show which rank
made them bad: they are summed over ranks. The records of ranks that read the same data are summed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tessera.core.batch import Batch
from tessera.core.engine import TrainingEngine
from tessera.core.step_source import StepSource
from tessera.core.task import Task
from tessera.errors import TesseraError, few_names
from tessera.observe.anomaly.activation_trace import ActivationTrace, TensorRecord, trace_step
from tessera.observe.anomaly.check import AnomalyKind
from tessera.observe.anomaly.state import Damage, find_damage
from tessera.runtime.collective import Ranks
from tessera.runtime.files import finite_json
from tessera.runtime.modules import clean_name

RECORD = "guard.jsonl"
MOST = 0.8  # share of the excess loss or gradient that the reported samples must cause


class GuardStop(TesseraError):
    """End the run: `guard.policy` or `guard.limit` demands it, its weights are damaged, or no update was applied."""

    exit_code = 3


@dataclass(frozen=True)
class BadStep:
    """Describe a bad step and its cause for the screen, `guard.jsonl` and the error that ends a run."""

    step: int  # number of the step, counted from 1
    kind: str
    loss: float
    grad_norm: float
    cause: Attribution | None = None  # None: the cause was not searched for
    damage: tuple[Damage, ...] = ()
    note: str = ""  # advice that is added to the log line

    @property
    def line(self) -> str:
        text = f"step {self.step} is bad ({self.kind}: loss {self.loss:.4g}, gradient norm {self.grad_norm:.4g})"
        if self.damage:
            text += f": parameter {few_names([str(tensor) for tensor in self.damage])}"
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
        row: dict[str, Any] = finite_json(
            {
                "step": self.step,
                "kind": self.kind,
                "loss": self.loss,
                "grad_norm": self.grad_norm,
                "module": cause.module or None,
                "parameters": [{"name": d.name, "worst": d.value, "count": d.count} for d in self.damage],
                "samples": list(cause.samples),
                "ambiguous": cause.ambiguous,
                "every_sample": cause.every_sample,
                "action": action,
                **({"note": self.note} if self.note else {}),
                **({} if back_to is None else {"back_to": back_to}),
            }
        )
        return row


@dataclass(frozen=True)
class Attribution:
    """Name the module in which a bad step went wrong, and the samples that caused it."""

    module: str  # such as "forward of vision.patch_embed"
    samples: tuple[str, ...] = ()
    ambiguous: bool = False  # some of `samples` are the cause, and it is unknown which
    every_sample: bool = False  # every sample of the step is bad when it is run alone


@dataclass(frozen=True)
class _Probe:
    """Describe a part of a micro-batch that is run by itself: some rows, each with only some of its samples."""

    rows: tuple[int, ...]
    ids: tuple[str, ...]
    others: tuple[str, ...]  # ids of samples of these rows that are not run


@dataclass(frozen=True)
class _Observation:
    """Hold loss and gradient size of a micro-batch or probe, of one rank or summed over ranks with the same data."""

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


_Key = tuple[int, int]  # data rank, and the index of a micro-batch or a `_Probe` on that rank


@dataclass(frozen=True)
class Attributor:
    """Run a bad step again to find its cause."""

    module: nn.Module
    engine: TrainingEngine
    task: Task
    device: torch.device
    microbatches: Sequence[Batch]
    source: StepSource  # reads samples of the step again
    data_rank: int  # position on the data axis: ranks that share it read the same rows
    engine_microbatches: int  # number of micro-batches in one step of the engine; its pipeline schedule needs as many
    seed: Callable[[], None]  # sets the random generators to their state at the start of the step
    most_probes: int

    def attribute(self, kind: AnomalyKind, usual_loss: float) -> Attribution:
        with kept_buffers(self.module):
            trace = self._trace(self.microbatches)
            module = "the loss" if kind == "loss spike" else "the gradients"
            if kind == "not finite":
                module = self._bad_module(trace)
            self.module.zero_grad(set_to_none=True)
            observed = self._join({n: _Observation.of(trace, n, batch) for n, batch in enumerate(self.microbatches)})
            suspects = {key: observed[key] for key in _bad(observed, kind, usual_loss)}
            samples, ambiguous = self._probe_samples(suspects, kind, usual_loss)
        names = {name for observation in observed.values() for name in observation.ids}
        # True if there are two or more samples and each is bad when it is run alone.
        every_sample = kind == "not finite" and len(names) > 1 and not ambiguous and names == set(samples)
        return Attribution(module, () if every_sample else samples, ambiguous, every_sample)

    def _trace(self, microbatches: Sequence[Batch]) -> ActivationTrace:
        self.seed()
        return trace_step(self.module, self.engine, self.task, microbatches)

    def _bad_module(self, trace: ActivationTrace) -> str:
        """Return the first module of any rank with bad outputs or gradients of outputs.

        If none has, return a parameter with a bad gradient, or "the loss".
        """
        modules = [module for module in Ranks.current().on_all(lambda: first_bad(trace.records)) if module is not None]
        if modules:
            return min(modules, key=lambda module: module[0])[1]
        gradients = {clean_name(n): p.grad for n, p in self.module.named_parameters() if p.grad is not None}
        damage = find_damage(gradients, {})
        return f"gradient of {damage[0].name}" if damage else "the loss"

    def _probes(self, observed: _Observation) -> list[_Probe]:
        """Return the parts of a micro-batch to run alone: samples, or rows if the data source cannot omit samples."""
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

    def _probe_samples(
        self, suspects: Mapping[_Key, _Observation], kind: AnomalyKind, usual_loss: float
    ) -> tuple[tuple[str, ...], bool]:
        """Run each sample of bad micro-batches alone. Return the bad samples, and whether some of these may be good."""
        plan: dict[int, list[_Probe]] = {}  # probes of each data rank
        samples: list[str] = []
        ambiguous = False
        for (data_rank, _), observation in suspects.items():
            probes = self._probes(observation)
            if len(probes) < 2 or len(probes) + len(plan.get(data_rank, ())) > self.most_probes:
                samples += observation.ids  # not probed: a single sample, or too many (`guard.probes`)
                ambiguous |= len(observation.ids) > 1
            else:
                plan.setdefault(data_rank, []).extend(probes)
        guilty = _bad(self._join(self._run(plan)), kind, usual_loss)
        samples += [name for data_rank, number in guilty for name in plan[data_rank][number].ids]
        if plan and not guilty and kind == "not finite":  # each probed sample alone is finite: any may be the cause
            samples += [name for probes in plan.values() for probe in probes for name in probe.ids]
            ambiguous = True
        return tuple(dict.fromkeys(samples)), ambiguous

    def _run(self, plan: Mapping[int, Sequence[_Probe]]) -> dict[int, _Observation]:
        """Run the probes of this rank. A rank without further probes runs a micro-batch, since all ranks must run."""
        mine = plan.get(self.data_rank, [])
        observed: dict[int, _Observation] = {}
        for number in range(max((len(probes) for probes in plan.values()), default=0)):
            batch = self.microbatches[0]
            if number < len(mine):
                batch = self.source.read_again(mine[number].rows, mine[number].others).to(self.device)
            trace = self._trace([batch] * self.engine_microbatches)
            self.module.zero_grad(set_to_none=True)
            if number < len(mine):
                observed[number] = _Observation.of(trace, 0, batch)
        return observed

    def _join(self, mine: Mapping[int, _Observation]) -> dict[_Key, _Observation]:
        joined: dict[_Key, _Observation] = {}
        for data_rank, observations in Ranks.current().on_all(lambda: (self.data_rank, mine)):
            for number, observation in observations.items():
                joined[data_rank, number] = joined.get((data_rank, number), _Observation()).joined(observation)
        return dict(sorted(joined.items()))


def _bad(observed: Mapping[_Key, _Observation], kind: AnomalyKind, usual_loss: float) -> list[_Key]:
    if kind == "not finite":
        return [key for key, row in observed.items() if not row.finite]
    excess = [row.loss - usual_loss * row.count if kind == "loss spike" else row.grad_sq for row in observed.values()]
    keys = list(observed)
    return [keys[number] for number in dominant(excess)]


@contextmanager
def kept_buffers(module: nn.Module) -> Iterator[None]:
    """Restore a module's buffers after the `with` block: forward changes some, such as the loads of experts."""
    copies = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in copies:
                buffer.copy_(before)


def first_bad(records: Sequence[TensorRecord]) -> tuple[int, str] | None:
    """Return the first module with an output, or a gradient of its output, that is not finite.

    Return (order, module). Of the results of several ranks, that with the lowest `order` is the likeliest cause. 0: the
    module's inputs were finite, so the fault began in this module. 1: its inputs were not finite. 2: only a gradient is
    not finite.
    """
    bad = [record for record in records if not record.finite]
    for record in bad:
        if record.moment == "output":
            if math.isfinite(record.before):
                return 0, f"forward of {record.module}"
            return 1, f"forward of {record.module} (its input was not finite already)"
    return (2, f"gradient of the output of {bad[0].module}") if bad else None


def dominant(excess: Sequence[float]) -> list[int]:
    """Return the indices of the largest values whose sum is at least the share `MOST` of the total.

    Return no indices if this takes more than half of several values: then no single sample is the cause.
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
