"""Compare the numbers of each step (samples, counts, losses, learning rates), and those that are set in modules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

from tessera.evaluation.parity.findings import ParityFinding
from tessera.evaluation.parity.judge import ROUNDINGS, eps_of
from tessera.evaluation.parity.recording import Recording, StepNumbers, TensorEntry


def compare_numbers(a: Recording, b: Recording, drift: Callable[[int], float]) -> Iterator[ParityFinding]:
    """Yield the comparison of samples, counts, losses and learning rates of each step that both recordings have."""
    theirs = _steps(b)
    for step, row in _steps(a).items():
        if step in theirs:
            yield _samples(step, a, b)
            yield from _scalars(row, theirs[step], eps_of(a.compute, b.compute), drift(step))
            yield from _rates(step, a, b)


def _steps(recording: Recording) -> dict[int, StepNumbers]:
    """Return the numbers of each step over all ranks, without sums that each context-parallel rank has of its part."""
    steps: dict[int, StepNumbers] = {}
    for record in recording.ranks:
        for row in record.steps:
            joined = steps.setdefault(row.step, StepNumbers(row.step, {}, row.counts, {}))
            for name in row.values:
                if record.split is None or not name.startswith("sum of"):
                    joined.values.setdefault(name, row.values[name])
                    joined.moved.setdefault(name, row.moved.get(name, 0.0))
    return steps


def _samples(step: int, a: Recording, b: Recording) -> ParityFinding:
    sides = []
    for side in (a, b):
        batches = {batch.rows: batch for record in side.ranks for batch in record.batches if batch.step == step}
        sides.append(sorted(name for batch in batches.values() for name in batch.samples))
    finding = ParityFinding(step, "data", "samples of the step", -1.0)
    if sides[0] != sides[1]:
        only = [sorted(set(sides[0]) - set(sides[1]))[:3], sorted(set(sides[1]) - set(sides[0]))[:3]]
        finding.reason = f"only the first recording has {only[0]}, only the second {only[1]}"
        finding.samples = tuple(only[0] + only[1])
    return finding


def _scalars(row: StepNumbers, other: StepNumbers, eps: float, drift: float) -> Iterator[ParityFinding]:
    for name in row.counts.keys() & other.counts.keys():
        finding = ParityFinding(row.step, "loss", f"count {name}", -1.0)
        if row.counts[name] != other.counts[name]:
            finding.reason = f"{row.counts[name]:.10g} and {other.counts[name]:.10g}"
        yield finding
    # `_rates` compares the learning rates; of the gradient norm the rounding is unknown: the gradients are compared
    for name in row.values.keys() & other.values.keys() - {"lr", "grad_norm"}:
        value, other_value = row.values[name], other.values[name]
        moved = max(row.moved.get(name, 0.0), other.moved.get(name, 0.0))
        limit = ROUNDINGS * drift * moved + 2 * eps * abs(value)
        finding = ParityFinding(row.step, "loss", name, 0.0 if name != "loss" else 1.0)
        finding.sides = ({"value": value}, {"value": other_value})
        finding.not_finite = int(not math.isfinite(value) and not math.isfinite(other_value))
        if abs(value - other_value) > limit or math.isfinite(value) != math.isfinite(other_value):
            finding.reason = f"{value:.8g} and {other_value:.8g}; rounding explains {limit:.2g}"
        yield finding


def _rates(step: int, a: Recording, b: Recording) -> Iterator[ParityFinding]:
    """Yield the learning rates that differ, by parameter."""
    sides: list[dict[str, TensorEntry]] = [
        {e.name: e for record in side.ranks for e in record.entries if (e.step, e.moment) == (step, "update")}
        for side in (a, b)
    ]
    for name, entry in sides[0].items():
        value, other_value = entry.lr, sides[1][name].lr if name in sides[1] else None
        if value is None or other_value is None:
            continue
        if abs(value - other_value) > 1e-12 * max(abs(value), abs(other_value)):
            yield ParityFinding(
                step, "update", name, entry.order - 0.5, reason=f"learning rate {value:.6g} and {other_value:.6g}"
            )


def compare_settings(a: Recording, b: Recording, pairs: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each number or boolean of a module, such as `eps` of a norm, that the recordings differ in.

    Integers, such as numbers of heads, depend on the layout. They are compared only between recordings of one layout.
    """
    ours, theirs = _settings(a), _settings(b)
    same_layout = _layout(a) == _layout(b)
    for name, settings in ours.items():
        others = theirs.get(pairs.get(name, name), {})
        for key, value in settings.items():
            if key in others and value != others[key] and (same_layout or type(value) is not int):
                yield f"{name}: {key} {value} and {others[key]}"


def _settings(recording: Recording) -> dict[str, dict[str, bool | int | float]]:
    return {name: settings for rank in reversed(recording.ranks) for name, settings in rank.settings.items()}


def _layout(recording: Recording) -> list[dict[str, int]]:
    return [{axis: size for axis, size in rank.sizes.items() if size > 1} for rank in recording.ranks]
