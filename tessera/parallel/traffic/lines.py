"""What ranks send each other in a step, by axis and kind: as a plan forecasts it, or as a dry run counted it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "send", "other"]


@dataclass(frozen=True)
class Traffic:
    """`bytes` are of the tensors that collectives work on, in all: what an all-gather makes, what a reduce-scatter or
    an all-to-all takes in. How much of it crosses a wire depends on the algorithm."""

    axis: str  # one axis of the mesh, or several that are one group: dp_shard+cp_ring
    kind: Kind
    count: int
    bytes: int


def added_up(parts: Iterable[Traffic]) -> list[Traffic]:
    """One line for each axis and kind, the most bytes first; nothing where nothing is sent."""
    found: dict[tuple[str, Kind], tuple[int, int]] = {}
    for part in parts:
        count, size = found.get((part.axis, part.kind), (0, 0))
        found[part.axis, part.kind] = (count + part.count, size + part.bytes)
    lines = [Traffic(axis, kind, count, size) for (axis, kind), (count, size) in found.items() if count]
    return sorted(lines, key=lambda line: (-line.bytes, line.axis, line.kind))


def traffic_text(parts: Sequence[Traffic]) -> list[str]:
    return [f"{part.axis:<24} {part.kind:<15} {part.count:>8}  {readable(part.bytes):>12}" for part in parts]


def readable(count: float) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{int(count)} B" if unit == "B" else f"{value:.2f} {unit}"
