"""Compare two recordings: data, weights, outputs, loss, gradients, learning rates and updates, in this order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tessera.errors import TesseraError
from tessera.evaluation.parity.findings import Comparison, ParityFinding
from tessera.evaluation.parity.joining import ByRows, Groups, Identity, JoinedTensor, RecordedShard, grouped, join
from tessera.evaluation.parity.judge import (
    ROUNDINGS,
    Difference,
    Rounding,
    change_of_update,
    difference,
    eps_of,
    statistics,
)
from tessera.evaluation.parity.numbers import compare_numbers, compare_settings
from tessera.evaluation.parity.recording import RecordedBatch, Recording

DIRECTION = "direction"  # recorded only to explain updates: it is not compared


def compare_recordings(a: Recording, b: Recording) -> Comparison:
    """Compare two recordings of the same steps."""
    names = a.pairs
    ours, theirs = grouped(a), grouped(b)
    if names:
        back = {other: name for name, other in names.items()}
        theirs = {(k[0], k[1], back[k[2]], k[3], k[4]): v for k, v in theirs.items() if k[2] in back}
    common = [key for key in ours if key in theirs]
    if not any(key[1] != "data" for key in common):
        raise TesseraError(
            "the recordings have no step and no module in common",
            where=f"{a.label} and {b.label}",
            fix="compare two recordings of the same steps of the same model",
            code="parity.nothing-in-common",
        )
    judge = _Judge(a, b, ours, theirs)
    compared = [key for key in common if key[1] != DIRECTION]
    findings = [finding for key in compared for finding in judge.findings(key, ours[key], theirs[key])]
    if names:
        missing = (key for key in ours if key[1] == "weight" and key not in theirs)
        judge.skipped += [f"weight {key[2]}: only the first recording has it in this form" for key in missing]
    else:
        findings += _only_on_one_side(ours, theirs)
    findings += compare_numbers(a, b, judge.drift)
    findings.sort(key=lambda finding: finding.position)
    settings = list(compare_settings(a, b, names))
    return Comparison((a.label, b.label), findings, judge.skipped, _note(findings), settings)


class _Judge:
    def __init__(self, a: Recording, b: Recording, ours: Groups, theirs: Groups) -> None:
        self._groups = ours, theirs
        self._first_step = min(step for step, *_ in ours)
        self._drifts: dict[tuple[int, str], float] = {}
        self._same_type = a.compute == b.compute
        entries = [e for side in (a, b) for record in side.ranks for e in record.entries if e.moment == "weight"]
        self._weights = {(entry.step, entry.name): max(abs(entry.max), abs(entry.min)) for entry in entries}
        self._batches = [batch for record in a.ranks for batch in record.batches]
        self.skipped: list[str] = []
        self._eps = eps_of(a.compute, b.compute)

    def findings(self, key: Identity, ours: ByRows, theirs: ByRows) -> Iterator[ParityFinding]:
        first = min((shard for shards in ours.values() for shard in shards), key=_position)
        if not _comparable_batch(key, ours, theirs):
            self.skipped.append(f"batch tensor {key[2]}: indices into micro-batches that are split in another way")
            return
        if ours.keys() != theirs.keys():
            yield from self._split_otherwise(key, ours, theirs)
            return
        for rows, shards in ours.items():
            finding = ParityFinding(key[0], key[1], key[2], _position(first)[0] * 1e7 + first.entry.order, rows)
            other = theirs[rows]
            first_side = join(shards, other[0].entry.whole or other[0].entry.shape)
            second_side = None if first_side is None else join(other, first_side.shape)
            if (
                second_side is not None
                and first_side is not None
                and first_side.shape != shards[0].entry.shape
                and len(shards) > 1
            ):
                first_side = join(shards, second_side.shape) or first_side
            if first_side is None or second_side is None:
                self.skipped.append(f"{finding.what} (rows {rows}): {_shapes(shards)} and {_shapes(other)}")
                continue
            yield self._judged(finding, first_side, second_side)

    def _split_otherwise(self, key: Identity, ours: ByRows, theirs: ByRows) -> Iterator[ParityFinding]:
        """Compare micro-batches of different sizes, with rows joined in the order of the data set."""
        sides = []
        for groups in (ours, theirs):
            ordered = sorted(groups, key=_row_numbers)
            joined = [join(groups[rows], groups[rows][0].entry.shape) for rows in ordered]
            sides.append((",".join(ordered), [part for part in joined if part is not None and part.tensor is not None]))
        (rows, first_side), (other, second_side) = sides
        if rows != other or not first_side or not second_side:
            self.skipped.append(f"{key[1]} {key[2]}: rows {rows} and {other} in micro-batches that cannot be joined")
            return
        value, other_value = _concatenated(first_side), _concatenated(second_side)
        if value is None or other_value is None:
            self.skipped.append(f"{key[1]} {key[2]}: micro-batches of different sizes")
            return
        yield self._judged(ParityFinding(key[0], key[1], key[2], value.entry.order, rows), value, other_value)

    def _judged(self, finding: ParityFinding, first_side: JoinedTensor, second_side: JoinedTensor) -> ParityFinding:
        entry, other = first_side.entry, second_side.entry
        finding.dtypes, finding.shape = (entry.dtype, other.dtype), tuple(first_side.shape)
        finding.requires_grad = (entry.requires_grad, other.requires_grad)
        finding.not_finite = min(first_side.not_finite, second_side.not_finite)
        if first_side.tensor is None or second_side.tensor is None:
            return self._by_statistics(finding, first_side, second_side)
        a, b = _same_stride(first_side, second_side)
        if a.shape != b.shape:
            aligned = _aligned(a, b)
            if aligned is None and finding.phase == "weight":
                finding.reason = f"shapes {list(a.shape)} and {list(b.shape)}"
                return finding
            if aligned is None:
                self.skipped.append(f"{finding.what}: shapes {list(a.shape)} and {list(b.shape)}")
                return finding
            a, b = aligned
        finding.sides = (statistics(a), statistics(b))
        if not (a.is_floating_point() or b.is_floating_point()):
            return self._exact(finding, a, b, first_side.stride)
        rounding, explained = self._rounding(finding, first_side, second_side), self._explained(finding, a, b)
        best = difference(a, b, rounding, explained)
        if best.differs and (first_side.partial or second_side.partial):
            best = min((best, _summed(first_side, second_side, rounding) or best), key=lambda apart: apart.excess)
        finding.difference = best
        if best.differs:
            finding.reason = _how_far(best)
            finding.samples = self._samples(finding, best.positions, max(first_side.stride, second_side.stride))
        elif (apart := _replica(first_side, second_side, rounding)) is not None and not (
            first_side.partial or second_side.partial
        ):
            finding.reason, finding.difference = f"ranks have different values: {_how_far(apart)}", apart
        return finding

    def _rounding(self, finding: ParityFinding, first_side: JoinedTensor, second_side: JoinedTensor) -> Rounding:
        eps = eps_of(first_side.entry.dtype, second_side.entry.dtype)
        if finding.phase in ("data", "weight"):
            return Rounding(0.0, 0.0, eps)
        if finding.phase == "update":  # the difference of two weights has the rounding of the weights
            size = self._weights.get((finding.step, finding.name), 0.0)
            return replace(self._measured(first_side, second_side, eps), floor=eps * size)
        return self._measured(first_side, second_side, eps)

    def _measured(self, first_side: JoinedTensor, second_side: JoinedTensor, eps: float) -> Rounding:
        moved = []
        for which in ("moved_max", "moved_rms"):
            values = [
                side.moved(which) for side in ((first_side, second_side) if not self._same_type else (first_side,))
            ]
            measured = [value for value in values if value is not None]
            moved.append(max(measured) if measured else second_side.moved(which))
        depth, drift = max(1.0, first_side.entry.order % 1e7), self.drift(first_side.entry.step, first_side.entry.name)
        return Rounding(moved[0], moved[1], eps, depth, drift=drift)

    def _explained(self, finding: ParityFinding, a: Tensor, b: Tensor) -> Tensor | None:
        """Return how much the elements of this tensor may differ because of earlier differences that are within their
        limits.
        """
        if finding.phase == "update":
            # Use the gradients of all steps so far: optimizers remember them, so an earlier difference of gradients
            # also changes this update.
            steps = range(self._first_step, finding.step + 1)
            gradients = filter(None, (self._parameter(step, "gradient", finding.name) for step in steps))
            largest = max(float(a.abs().max()), float(b.abs().max())) if a.numel() else 0.0
            changes = [change_of_update(*pair, largest) for pair in gradients if pair[0].shape == a.shape]
            direction = self._parameter(finding.step, DIRECTION, finding.name)
            if direction is not None and direction[0].shape == a.shape:
                # A mean of gradients of different signs may be smaller than its own rounding.
                changes.append(change_of_update(*direction, largest, self._allowed_direction(finding)))
            return torch.stack(changes).amax(0) if changes else None
        if finding.phase == "weight" and finding.step > self._first_step:
            before = [self._parameter(finding.step - 1, moment, finding.name) for moment in ("weight", "update")]
            sums = [(first.double() - second.double()).abs() for first, second in filter(None, before)]
            return torch.stack(sums).sum(0) if sums and all(part.shape == a.shape for part in sums) else None
        return None

    def _allowed_direction(self, finding: ParityFinding) -> float:
        """Return the largest difference of the direction of an update that rounding explains."""
        sides = self._joined(finding.step, DIRECTION, finding.name)
        tensor = None if sides is None else sides[0].tensor
        if sides is None or tensor is None or not tensor.numel():
            return 0.0
        size = tensor.double()
        rounding = self._measured(*sides, eps_of(sides[0].entry.dtype, sides[1].entry.dtype))
        return rounding.limits(float(size.abs().max()), float(size.square().mean().sqrt()))[0]

    def _parameter(self, step: int, moment: str, name: str) -> tuple[Tensor, Tensor] | None:
        """Return the tensors of a parameter in both recordings, unsharded and with the same stride.

        Return None if a recording lacks it, or if their shapes differ.
        """
        sides = self._joined(step, moment, name)
        if sides is None or sides[0].tensor is None or sides[1].tensor is None:
            return None
        a, b = _same_stride(*sides)
        return (a, b) if a.shape == b.shape else None

    def _joined(self, step: int, moment: str, name: str) -> tuple[JoinedTensor, JoinedTensor] | None:
        shards = [list(groups.get((step, moment, name, 0, 0), {}).values()) for groups in self._groups]
        if not all(len(group) == 1 for group in shards):
            return None
        first, second = (join(group, group[0].entry.whole or group[0].entry.shape) for (group,) in shards)
        return None if first is None or second is None else (first, second)

    def drift(self, step: int, module: str = "") -> float:
        """Return by how many roundings the weights of the recordings differ at a step, after updates that agree.

        With `module`, return the larger value of all weights and of those of the module.
        """
        if step == self._first_step:
            return 1.0
        if (step, module) not in self._drifts:
            weights = [key[2] for key in self._groups[0] if key[:2] == (step, "weight")]
            names = [name for name in weights if not module or f"{name}.".startswith(f"{module}.")]
            pairs = list(filter(None, (self._parameter(step, "weight", name) for name in names)))
            apart = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs)
            size = sum(float(a.double().square().sum()) for a, _ in pairs)
            roundings = math.sqrt(apart / size) / self._eps if size and self._eps else 1.0
            self._drifts[step, module] = max(roundings, self.drift(step) if module else 1.0)
        return self._drifts[step, module]

    def _by_statistics(
        self, finding: ParityFinding, first_side: JoinedTensor, second_side: JoinedTensor
    ) -> ParityFinding:
        moved = max(
            first_side.moved("moved_norm") or 0.0, 0.0 if self._same_type else second_side.moved("moved_norm") or 0.0
        )
        if first_side.moved("moved_norm") is None and finding.phase != "weight":
            moved = self._eps * math.sqrt(max(1.0, first_side.entry.order)) * first_side.norm
        limit = ROUNDINGS * moved * self.drift(finding.step)
        limit += 2 * eps_of(first_side.entry.dtype, second_side.entry.dtype) * first_side.norm
        finding.sides = ({"norm": first_side.norm}, {"norm": second_side.norm})
        # later weights differ by their updates, which are compared, so these norms are no finding
        updated = finding.phase == "weight" and finding.step > self._first_step
        if abs(first_side.norm - second_side.norm) > limit and not updated:
            finding.reason = (
                f"the norms are {first_side.norm:.6g} and {second_side.norm:.6g}; rounding explains {limit:.2g}"
            )
        return finding

    def _exact(self, finding: ParityFinding, a: Tensor, b: Tensor, stride: int) -> ParityFinding:
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

    def _samples(self, finding: ParityFinding, positions: Sequence[int], stride: int) -> tuple[str, ...]:
        """Return the samples, in the packed row, to which the positions belong.

        If the tensor does not have an entry per token, return all samples of the micro-batch.
        """
        if finding.phase not in ("data", "output", "output_gradient"):
            return ()
        batch = next((b for b in self._batches if (b.step, b.rows) == (finding.step, finding.rows)), None)
        if batch is None:
            return ()
        if not finding.shape or not batch.bounds or finding.shape[0] != batch.bounds[-1]:
            return tuple(batch.samples)
        return _samples_at(batch, [position * stride for position in positions])


def _comparable_batch(key: tuple[Any, ...], ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Return whether equal samples must have equal values of a batch tensor in both recordings.

    Tokens and labels always must. Other tensors can contain indices, which depend on how the batch is split.
    """
    if key[1] != "data" or key[2] in ("tokens", "labels"):
        return True
    shards = [shard for side in (ours, theirs) for group in side.values() for shard in group]
    return ours.keys() == theirs.keys() and all(shard.rank.split is None for shard in shards)


def _samples_at(batch: RecordedBatch, positions: Sequence[int]) -> tuple[str, ...]:
    names: dict[str, None] = {}
    bounds = torch.tensor(batch.bounds)
    for number in torch.searchsorted(bounds, torch.tensor(positions), right=True).tolist():
        if 0 < number <= len(batch.samples):
            names[batch.samples[number - 1]] = None
    return tuple(names)


def _position(shard: RecordedShard) -> tuple[int, float]:
    """Return the position of an entry in the order of execution. Backward begins at the last stage."""
    backward = shard.entry.moment in ("output_gradient", "gradient")
    return (999 - shard.entry.stage if backward else shard.entry.stage), shard.entry.order


def _row_numbers(rows: str) -> tuple[int, str]:
    first = rows.split(",")[0]
    return (int(first), "") if first.isdecimal() else (0, rows)


def _shapes(shards: Sequence[RecordedShard]) -> str:
    return " + ".join(str(shard.entry.shape) for shard in shards[:4])


def _concatenated(parts: Sequence[JoinedTensor]) -> JoinedTensor | None:
    tensors = [part.tensor for part in parts if part.tensor is not None]
    if any(part.stride != 1 or not part.shape or part.shape[1:] != parts[0].shape[1:] for part in parts):
        return None
    whole = torch.cat(tensors)
    return JoinedTensor([shard for part in parts for shard in part.shards], whole, list(whole.shape))


def _same_stride(first_side: JoinedTensor, second_side: JoinedTensor) -> tuple[Tensor, Tensor]:
    """Return the elements that both recordings contain, as two tensors with the larger stride of both."""
    stride = max(first_side.stride, second_side.stride)
    return tuple(
        side.tensor[:: stride // side.stride] if side.tensor.dim() else side.tensor  # type: ignore[return-value]
        for side in (first_side, second_side)
        if side.tensor is not None
    )


def _aligned(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor] | None:
    """Reshape two tensors to a common shape: one may have a batch dimension of 1, or heads before tokens."""
    trimmed, other = (torch.Size(size for size in tensor.shape if size != 1) for tensor in (a, b))
    a, b = a.reshape(trimmed), b.reshape(other)
    if trimmed == other:
        return a, b
    if sorted(trimmed) == sorted(other):
        return (a, b.permute([other.index(size) for size in trimmed])) if len(set(trimmed)) == len(trimmed) else None
    if a.numel() != b.numel() or trimmed[-1:] != other[-1:] or len(trimmed) == len(other):
        return None
    return a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])


def _replica(first_side: JoinedTensor, second_side: JoinedTensor, rounding: Rounding) -> Difference | None:
    """Return the difference between a replica on another rank and the first copy, if it is more than rounding
    explains.
    """
    for side in (first_side, second_side):
        for copy in side.replicas:
            if side.tensor is not None and (apart := difference(side.tensor, copy, rounding)).differs:
                return apart
    return None


def _summed(first_side: JoinedTensor, second_side: JoinedTensor, rounding: Rounding) -> Difference | None:
    """Compare each tensor with the sum over ranks of the other one; return the smaller difference.

    One recording may contain the parts of a gradient that its ranks computed, the other one the sum of all parts.
    """
    sides = []
    for side in (first_side, second_side):
        assert side.tensor is not None
        sides.append(torch.stack([side.tensor.double(), *(copy.double() for copy in side.replicas)]).sum(0))
    first, second = first_side.tensor, second_side.tensor
    assert first is not None
    assert second is not None
    options = [(a, b) for a, b in ((first, sides[1]), (sides[0], second)) if a.shape == b.shape]
    results = [difference(a, b, rounding) for a, b in options]
    return min(results, key=lambda apart: apart.excess, default=None)


def _how_far(apart: Difference) -> str:
    if apart.not_finite:
        return f"{apart.not_finite} elements are not finite in one recording only"
    return (
        f"at most {apart.max_abs:.3g} apart, rounding explains {apart.limit_max:.2g}; root mean square "
        f"{apart.rms:.3g} of {apart.limit_rms:.2g}; cosine {apart.cosine:.6f}"
    )


def _only_on_one_side(ours: Groups, theirs: Groups) -> Iterator[ParityFinding]:
    """Yield gradients and updates that only one recording contains: the other run does not train the parameter."""
    steps = {key[0] for key in ours} & {key[0] for key in theirs}
    for here, there, side in ((ours, theirs, "first"), (theirs, ours, "second")):
        for key, groups in here.items():
            if key[1] in ("gradient", "update") and key not in there and key[0] in steps:
                entry = next(iter(groups.values()))[0].entry
                yield ParityFinding(key[0], key[1], key[2], entry.order, reason=f"only the {side} recording has it")


def _note(findings: Sequence[ParityFinding]) -> str:
    """Return an explanation of the pattern of differences, if the pattern is known; else ""."""
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
