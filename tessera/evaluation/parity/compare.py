"""Compare two recordings: data, weights, outputs, loss, gradients, learning rates and updates, in this order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tessera.errors import TesseraError
from tessera.evaluation.parity.joining import Groups, Joined, Shard, grouped, join
from tessera.evaluation.parity.judge import ROUNDINGS, Difference, Rounding, difference, eps_of, statistics
from tessera.evaluation.parity.recording import Entry, MicroBatch, Recording, StepNumbers

PHASES = ("data", "weight", "output", "loss", "output_gradient", "gradient", "grad_norm", "update")
_WORDS = {
    "data": "batch tensor",
    "weight": "weight",
    "output": "output of",
    "output_gradient": "gradient of the output of",
    "gradient": "gradient of",
    "update": "update of",
}
_SCALARS = ("loss", "grad_norm")


@dataclass
class Finding:
    """Hold the comparison of one thing: a tensor, or a number of the step."""

    step: int
    phase: str
    name: str
    order: float = 0.0
    rows: str = ""
    reason: str = ""  # why it differs; empty: it does not
    difference: Difference | None = None
    samples: tuple[str, ...] = ()
    sides: tuple[dict[str, Any], dict[str, Any]] = field(default_factory=lambda: ({}, {}))
    dtypes: tuple[str, str] = ("", "")
    shape: tuple[int, ...] = ()
    requires_grad: tuple[bool, bool] = (False, False)

    @property
    def differs(self) -> bool:
        return bool(self.reason)

    @property
    def what(self) -> str:
        return f"{_WORDS[self.phase]} {self.name}" if self.phase in _WORDS else self.name

    @property
    def place(self) -> tuple[int, int, float]:
        """Return a key that sorts findings by execution. Gradients of outputs and parameters are one phase."""
        phase = "output_gradient" if self.phase == "gradient" else self.phase
        return self.step, PHASES.index(phase), self.order

    @property
    def line(self) -> str:
        text = f"step {self.step}: {self.what}"
        text += f" (rows {self.rows})" if self.rows else ""
        if self.differs:
            text += f": {self.reason}"
            text += f"; samples {', '.join(self.samples[:4])}" if self.samples else ""
        return text


@dataclass
class Comparison:
    """Hold all findings in the order of execution, and what could not be compared."""

    labels: tuple[str, str]
    findings: list[Finding]
    skipped: list[str]
    note: str = ""

    @property
    def different(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.differs]

    @property
    def first(self) -> Finding | None:
        return next(iter(self.different), None)


def compare_recordings(a: Recording, b: Recording, pairs: Mapping[str, str] | None = None) -> Comparison:
    """Compare two recordings of the same steps. `pairs`: names of `a` -> names of `b`, if they differ."""
    names = {**a.pairs, **(pairs or {})}
    ours, theirs = grouped(a), grouped(b)
    if names:
        back = {other: name for name, other in names.items()}
        theirs = {(k[0], k[1], back[k[2]], k[3], k[4]): v for k, v in theirs.items() if k[2] in back}
    common = [key for key in ours if key in theirs]
    if not any(key[1] != "data" for key in common):
        raise TesseraError(
            "the recordings have no step and no module in common",
            where=f"{a.label} and {b.label}",
            fix="record the same steps of the same model on both sides",
            code="parity.nothing-in-common",
        )
    judge = _Judge(a, b)
    findings = [finding for key in common for finding in judge.findings(key, ours[key], theirs[key])]
    findings += [] if names else list(_only_on_one_side(ours, theirs))
    findings += _numbers(a, b)
    findings.sort(key=lambda finding: finding.place)
    return Comparison((a.label, b.label), findings, judge.skipped, _note(findings))


class _Judge:
    def __init__(self, a: Recording, b: Recording) -> None:
        self._same_type = a.compute == b.compute
        self._batches = [batch for record in a.ranks for batch in record.batches]
        self.skipped: list[str] = []
        self._eps = eps_of(a.compute, b.compute)

    def findings(
        self, key: tuple[int, str, str, int, int], ours: dict[str, list[Shard]], theirs: dict[str, list[Shard]]
    ) -> Iterator[Finding]:
        first = min((shard for shards in ours.values() for shard in shards), key=_position)
        if ours.keys() != theirs.keys():
            yield from self._split_otherwise(key, ours, theirs)
            return
        for rows, shards in ours.items():
            finding = Finding(key[0], key[1], key[2], _position(first)[0] * 1e7 + first.entry.order, rows)
            other = theirs[rows]
            left = join(shards, other[0].entry.whole or other[0].entry.shape)
            right = None if left is None else join(other, left.shape)
            if right is not None and left is not None and left.shape != shards[0].entry.shape and len(shards) > 1:
                left = join(shards, right.shape) or left
            if left is None or right is None:
                left = join(shards, shards[0].entry.whole or shards[0].entry.shape)
                self.skipped.append(f"{finding.what} (rows {rows}): {_shapes(shards)} and {_shapes(other)}")
                continue
            yield self._judged(finding, left, right)

    def _split_otherwise(
        self, key: tuple[int, str, str, int, int], ours: dict[str, list[Shard]], theirs: dict[str, list[Shard]]
    ) -> Iterator[Finding]:
        """Compare micro-batches of different sizes: their rows are put together in the order of the data set."""
        sides = []
        for groups in (ours, theirs):
            ordered = sorted(groups, key=_row_numbers)
            joined = [join(groups[rows], groups[rows][0].entry.shape) for rows in ordered]
            sides.append((",".join(ordered), [one for one in joined if one is not None and one.tensor is not None]))
        (rows, left), (other, right) = sides
        if rows != other or not left or not right:
            self.skipped.append(f"{key[1]} {key[2]}: rows {rows} and {other} in micro-batches that cannot be joined")
            return
        one, two = _concatenated(left), _concatenated(right)
        if one is None or two is None:
            self.skipped.append(f"{key[1]} {key[2]}: micro-batches of different sizes")
            return
        yield self._judged(Finding(key[0], key[1], key[2], one.entry.order, rows), one, two)

    def _judged(self, finding: Finding, left: Joined, right: Joined) -> Finding:
        entry, other = left.entry, right.entry
        finding.dtypes, finding.shape = (entry.dtype, other.dtype), tuple(left.shape)
        finding.requires_grad = (entry.requires_grad, other.requires_grad)
        if left.tensor is None or right.tensor is None:
            return self._by_statistics(finding, left, right)
        a, b = _same_stride(left, right)
        if a.shape != b.shape:
            if a.numel() != b.numel() or a.shape[-1:] != b.shape[-1:]:
                self.skipped.append(f"{finding.what}: shapes {list(a.shape)} and {list(b.shape)}")
                return finding
            a, b = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
        finding.sides = (statistics(a), statistics(b))
        if not (a.is_floating_point() or b.is_floating_point()):
            return self._exact(finding, a, b, left.stride)
        rounding = self._rounding(finding, left, right)
        best = difference(a, b, rounding)
        if best.differs and (left.partial or right.partial):
            best = min((best, _summed(left, right, rounding)), key=lambda found: found.excess)
        finding.difference = best
        if best.differs:
            finding.reason = _how_far(best)
            finding.samples = self._samples(finding, best.positions, max(left.stride, right.stride))
        elif (apart := _replica(left, right, rounding)) is not None and not (left.partial or right.partial):
            finding.reason, finding.difference = f"ranks have different values: {_how_far(apart)}", apart
        return finding

    def _rounding(self, finding: Finding, left: Joined, right: Joined) -> Rounding:
        eps = eps_of(left.entry.dtype, right.entry.dtype)
        if finding.phase in ("data", "weight"):
            return Rounding(0.0, 0.0, eps)
        moved = []
        for which in ("moved_max", "moved_rms"):
            values = [side.moved(which) for side in ((left, right) if not self._same_type else (left,))]
            measured = [value for value in values if value is not None]
            moved.append(max(measured) if measured else right.moved(which))
        return Rounding(moved[0], moved[1], eps, max(1.0, left.entry.order % 1e7))

    def _by_statistics(self, finding: Finding, left: Joined, right: Joined) -> Finding:
        moved = max(left.moved("moved_norm") or 0.0, 0.0 if self._same_type else right.moved("moved_norm") or 0.0)
        if left.moved("moved_norm") is None and finding.phase != "weight":
            moved = self._eps * math.sqrt(max(1.0, left.entry.order)) * left.norm
        limit = ROUNDINGS * moved + 2 * eps_of(left.entry.dtype, right.entry.dtype) * left.norm
        finding.sides = ({"norm": left.norm}, {"norm": right.norm})
        if abs(left.norm - right.norm) > limit:
            finding.reason = f"the norms are {left.norm:.6g} and {right.norm:.6g}; rounding explains {limit:.2g}"
        return finding

    def _exact(self, finding: Finding, a: Tensor, b: Tensor, stride: int) -> Finding:
        apart = (a != b).reshape(len(a), -1).any(1) if a.dim() else (a != b).reshape(1)
        positions = (apart.nonzero().flatten() * stride).tolist()
        if positions:
            at = positions[0] // stride
            finding.reason = (
                f"{len(positions)} of {len(apart)} entries differ, the first at {positions[0]}: "
                f"{a[at].tolist() if a.dim() else a.item()} and {b[at].tolist() if b.dim() else b.item()}"
            )[:300]
            finding.samples = self._samples(finding, positions, 1)
        return finding

    def _samples(self, finding: Finding, positions: Sequence[int], stride: int) -> tuple[str, ...]:
        """Return the samples of the packed row that the positions belong to, if the tensor has an entry per token."""
        if finding.phase not in ("data", "output", "output_gradient"):
            return ()
        batch = next((b for b in self._batches if (b.step, b.rows) == (finding.step, finding.rows)), None)
        if batch is None:
            return ()
        if not finding.shape or not batch.bounds or finding.shape[0] != batch.bounds[-1]:
            return tuple(batch.samples)
        return _samples_at(batch, [position * stride for position in positions])


def _samples_at(batch: MicroBatch, positions: Sequence[int]) -> tuple[str, ...]:
    names: dict[str, None] = {}
    bounds = torch.tensor(batch.bounds)
    for number in torch.searchsorted(bounds, torch.tensor(positions), right=True).tolist():
        if 0 < number <= len(batch.samples):
            names[batch.samples[number - 1]] = None
    return tuple(names)


def _position(shard: Shard) -> tuple[int, float]:
    """Return where an entry is in the order of execution: backward begins at the last stage."""
    backward = shard.entry.moment in ("output_gradient", "gradient")
    return (999 - shard.entry.stage if backward else shard.entry.stage), shard.entry.order


def _row_numbers(rows: str) -> tuple[int, str]:
    first = rows.split(",")[0]
    return (int(first), "") if first.isdecimal() else (0, rows)


def _shapes(shards: Sequence[Shard]) -> str:
    return " + ".join(str(shard.entry.shape) for shard in shards[:4])


def _concatenated(parts: Sequence[Joined]) -> Joined | None:
    tensors = [part.tensor for part in parts if part.tensor is not None]
    if any(part.stride != 1 or not part.shape or part.shape[1:] != parts[0].shape[1:] for part in parts):
        return None
    whole = torch.cat(tensors)
    return Joined([shard for part in parts for shard in part.shards], whole, list(whole.shape))


def _same_stride(left: Joined, right: Joined) -> tuple[Tensor, Tensor]:
    """Return the elements that both sides keep."""
    stride = max(left.stride, right.stride)
    return tuple(
        side.tensor[:: stride // side.stride] if side.tensor.dim() else side.tensor  # type: ignore[return-value]
        for side in (left, right)
        if side.tensor is not None
    )


def _replica(left: Joined, right: Joined, rounding: Rounding) -> Difference | None:
    """Return how far a replica of another rank is from its first copy, if it is farther than rounding explains."""
    for side in (left, right):
        for copy in side.replicas:
            if side.tensor is not None and (apart := difference(side.tensor, copy, rounding)).differs:
                return apart
    return None


def _summed(left: Joined, right: Joined, rounding: Rounding) -> Difference:
    """Compare the sums over ranks: each rank may have the gradient from its part of the work."""
    sides = []
    for side in (left, right):
        assert side.tensor is not None
        sides.append(torch.stack([side.tensor.double(), *(copy.double() for copy in side.replicas)]).sum(0))
    options = [(left.tensor, sides[1]), (sides[0], right.tensor)]
    results = [difference(a, b, rounding) for a, b in options if a is not None and b is not None and a.shape == b.shape]
    return min(results, key=lambda found: found.excess)


def _how_far(apart: Difference) -> str:
    if apart.not_finite:
        return f"{apart.not_finite} elements are not finite on one side only"
    return (
        f"at most {apart.max_abs:.3g} apart, rounding explains {apart.limit_max:.2g}; root mean square "
        f"{apart.rms:.3g} of {apart.limit_rms:.2g}; cosine {apart.cosine:.6f}"
    )


def _only_on_one_side(ours: Groups, theirs: Groups) -> Iterator[Finding]:
    """Yield gradients and updates that only one side has: the other does not train the parameter."""
    steps = {key[0] for key in ours} & {key[0] for key in theirs}
    for here, there, side in ((ours, theirs, "first"), (theirs, ours, "second")):
        for key, groups in here.items():
            if key[1] in ("gradient", "update") and key not in there and key[0] in steps:
                entry = next(iter(groups.values()))[0].entry
                yield Finding(key[0], key[1], key[2], entry.order, reason=f"only the {side} side has it")


def _numbers(a: Recording, b: Recording) -> Iterator[Finding]:
    """Yield the comparison of samples, counts, loss, gradient norm and learning rates of each step."""
    theirs = _steps(b)
    for step, row in _steps(a).items():
        if step in theirs:
            yield _samples(step, a, b)
            yield from _scalars(row, theirs[step], eps_of(a.compute, b.compute))
            yield from _rates(step, a, b)


def _steps(recording: Recording) -> dict[int, StepNumbers]:
    """Return the numbers of each step over all ranks. Sums of context parallel ranks are left out."""
    steps: dict[int, StepNumbers] = {}
    for record in recording.ranks:
        for row in record.steps:
            joined = steps.setdefault(row.step, StepNumbers(row.step, {}, row.counts, {}))
            for name in row.values:
                if record.split is None or not name.startswith("sum of"):
                    joined.values.setdefault(name, row.values[name])
                    joined.moved.setdefault(name, row.moved.get(name, 0.0))
    return steps


def _samples(step: int, a: Recording, b: Recording) -> Finding:
    sides = []
    for side in (a, b):
        batches = {one.rows: one for record in side.ranks for one in record.batches if one.step == step}
        sides.append(sorted(name for batch in batches.values() for name in batch.samples))
    finding = Finding(step, "data", "samples of the step", -1.0)
    if sides[0] != sides[1]:
        only = [sorted(set(sides[0]) - set(sides[1]))[:3], sorted(set(sides[1]) - set(sides[0]))[:3]]
        finding.reason = f"only the first side has {only[0]}, only the second {only[1]}"
        finding.samples = tuple(only[0] + only[1])
    return finding


def _scalars(row: StepNumbers, other: StepNumbers, eps: float) -> Iterator[Finding]:
    for name in row.counts.keys() & other.counts.keys():
        finding = Finding(row.step, "loss", f"count {name}", -1.0)
        if row.counts[name] != other.counts[name]:
            finding.reason = f"{row.counts[name]:.10g} and {other.counts[name]:.10g}"
        yield finding
    for name in row.values.keys() & other.values.keys():
        if name == "lr":
            continue
        one, two = row.values[name], other.values[name]
        moved = max(row.moved.get(name, 0.0), other.moved.get(name, 0.0))
        if name == "grad_norm":  # no pass measured it; the gradients themselves are compared
            continue
        limit = ROUNDINGS * moved + 2 * eps * abs(one)
        finding = Finding(row.step, "loss", name, 0.0 if name != "loss" else 1.0)
        finding.sides = ({"value": one}, {"value": two})
        if abs(one - two) > limit or math.isfinite(one) != math.isfinite(two):
            finding.reason = f"{one:.8g} and {two:.8g}; rounding explains {limit:.2g}"
        yield finding


def _rates(step: int, a: Recording, b: Recording) -> Iterator[Finding]:
    """Yield the learning rates that differ, by parameter."""
    sides: list[dict[str, Entry]] = [
        {e.name: e for record in side.ranks for e in record.entries if (e.step, e.moment) == (step, "update")}
        for side in (a, b)
    ]
    for name, entry in sides[0].items():
        one, two = entry.lr, sides[1][name].lr if name in sides[1] else None
        if one is not None and two is not None and abs(one - two) > 1e-12 * max(abs(one), abs(two)):
            yield Finding(step, "update", name, entry.order - 0.5, reason=f"learning rate {one:.6g} and {two:.6g}")


def _note(findings: Sequence[Finding]) -> str:
    """Return what the pattern of differences means, where it means something."""
    first = next((finding for finding in findings if finding.differs), None)
    if first is None:
        return ""
    step = [finding for finding in findings if finding.step == first.step]
    gradients = any(f.differs for f in step if f.phase == "gradient")
    outputs = [f for f in step if f.phase == "output_gradient"]
    if first.phase == "gradient" and outputs and not any(f.differs for f in outputs) and gradients:
        return (
            "gradients of all outputs agree in every micro-batch, and gradients of parameters do not: "
            "the sum over ranks or micro-batches is wrong"
        )
    return ""
