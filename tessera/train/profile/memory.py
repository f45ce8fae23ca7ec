"""The memory of a window: every allocation and release played again, and who held what at the highest point."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from tessera.core.tensors import local_part
from tessera.train.profile.events import Recording
from tessera.train.profile.owners import Owned, Owner

BEFORE = "held since before the window"
NAMELESS = "nothing that has a name"


@dataclass(frozen=True)
class Span:
    start: int
    end: int
    name: str  # forward, backward, optimizer, ...


@dataclass(frozen=True)
class Timeline:
    points: list[tuple[int, int]]  # time, bytes
    peak: int
    peak_time: int
    peak_phase: str
    holders: list[tuple[str, int]]  # at the peak, largest first
    spans: list[Span]


def replay(recording: Recording, owned: Owned, known: Mapping[str, int], accelerated: bool) -> Timeline | None:
    """`known`: bytes that were held when the window began, by name. None where nothing was allocated."""
    if not recording.allocations:
        return None
    first = recording.allocations[0]
    # A device's allocator knows what it gave out before; that of the host counts from here.
    base = first.total - first.size if accelerated else sum(known.values())
    live: dict[int, tuple[int, Owner]] = {}
    held: dict[Owner, int] = defaultdict(int)
    earlier = now = base
    points, peak, at, at_peak = [(owned.phases[0][0], base)], base, first.time, {}
    earlier_at_peak = base
    for one in recording.allocations:
        now += one.size
        if one.size > 0:
            owner = owned.by_id.get(one.host, Owner(NAMELESS))
            live[one.address] = (one.size, owner)
            held[owner] += one.size
        elif one.address in live:
            size, owner = live.pop(one.address)
            held[owner] -= size
        else:
            earlier += one.size
        points.append((one.time, now))
        if now > peak:
            peak, at, at_peak, earlier_at_peak = now, one.time, dict(held), earlier
    holders = [(str(owner), size) for owner, size in at_peak.items() if size > 0]
    rest = earlier_at_peak
    for name, size in known.items():
        holders.append((name, min(size, max(rest, 0))))
        rest -= size
    holders.append((BEFORE, rest))
    spans = stretches(owned)
    return Timeline(
        points,
        peak,
        at,
        next((span.name for span in spans if span.start <= at < span.end), "between steps"),
        sorted([one for one in holders if one[1] > 0], key=lambda one: -one[1]),
        spans,
    )


def stretches(owned: Owned) -> list[Span]:
    """What the host did one after another. Within the model's phase: forward and backward in turns."""
    names = {"finishing gradients": "clipping", "updating weights": "optimizer", "loading data": "data"}
    spans: list[Span] = []
    for start, end, phase in owned.phases:
        if phase != "running the model":
            spans.append(Span(start, end, names.get(phase, "other")))
            continue
        current: str = "forward"
        since = start
        for time, name in owned.turns:
            if start <= time < end and name != current:
                spans.append(Span(since, time, current))
                current, since = name, time
        spans.append(Span(since, end, current))
    return [span for span in spans if span.end > span.start]


def held_now(module: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> dict[str, int]:
    """Bytes on this device that have names, before a step."""
    parameters = list(module.parameters())
    state = [t for kept in optimizer.state.values() for t in kept.values() if isinstance(t, Tensor)]
    return {
        "weights": _bytes([*parameters, *module.buffers()], device),
        "optimizer state": _bytes(state, device),
        "gradients": _bytes([p.grad for p in parameters if p.grad is not None], device),
    }


def _bytes(tensors: Iterable[Tensor], device: torch.device) -> int:
    places = {}
    for tensor in map(local_part, tensors):
        if tensor.device.type == device.type:
            storage = tensor.untyped_storage()
            places[storage.data_ptr()] = storage.nbytes()
    return sum(places.values())


def write_csv(timeline: Timeline, path: Path) -> None:
    """Time in milliseconds of the window, bytes allocated, and what the host did."""
    start, number = timeline.points[0][0], 0
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["ms", "bytes", "phase"])
        for time, size in timeline.points:
            while number < len(timeline.spans) - 1 and timeline.spans[number].end <= time:
                number += 1
            rows.writerow([f"{(time - start) / 1e6:.4f}", size, timeline.spans[number].name])
