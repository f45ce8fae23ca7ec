"""Replay the allocations of the profiled steps: memory over time, and what used it at the peak."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from tessera.observe.profile.account import Owned, WorkOwner
from tessera.observe.profile.recording import Recording
from tessera.runtime import html
from tessera.runtime.modules import local_shard

BEFORE = "allocated before the window"
NAMELESS = "no known module or phase"
_COLORS = {
    "forward": "#4c7be8",
    "backward": "#d9822b",
    "optimizer": "#2e8b57",
    "clipping": "#8a63c9",
    "data": "#c23b3b",
}
_OTHER = "#8a94a6"


@dataclass(frozen=True)
class PhaseSpan:
    """Name what the host did in a part of the window."""

    start: int
    end: int
    name: str  # forward, backward, optimizer, ...


@dataclass(frozen=True)
class Timeline:
    """Hold memory over time and what used it at its peak."""

    points: list[tuple[int, int]]  # time, bytes
    peak: int
    peak_time: int
    peak_phase: str
    users: list[tuple[str, int]]  # at the peak, largest first
    spans: list[PhaseSpan]


def replay(recording: Recording, owned: Owned, known: Mapping[str, int], accelerated: bool) -> Timeline | None:
    """Return memory over time; None where nothing was allocated. `known`: bytes at the start of the window."""
    if not recording.allocations:
        return None
    first = recording.allocations[0]
    # The allocator of a device knows earlier allocations; that of the host starts to count here.
    base = first.total - first.size if accelerated else sum(known.values())
    live: dict[int, tuple[int, WorkOwner]] = {}
    in_use: dict[WorkOwner, int] = defaultdict(int)
    earlier = now = base
    points, peak, at, at_peak = [(owned.phases[0][0], base)], base, first.time, {}
    earlier_at_peak = base
    for one in recording.allocations:
        now += one.size
        if one.size > 0:
            owner = owned.by_id.get(one.host, WorkOwner(NAMELESS))
            live[one.address] = (one.size, owner)
            in_use[owner] += one.size
        elif one.address in live:
            size, owner = live.pop(one.address)
            in_use[owner] -= size
        else:
            earlier += one.size
        points.append((one.time, now))
        if now > peak:
            peak, at, at_peak, earlier_at_peak = now, one.time, dict(in_use), earlier
    users = [(str(owner), size) for owner, size in at_peak.items() if size > 0]
    rest = earlier_at_peak
    for name, size in known.items():
        users.append((name, min(size, max(rest, 0))))
        rest -= size
    users.append((BEFORE, rest))
    spans = phase_spans(owned)
    return Timeline(
        points,
        peak,
        at,
        next((span.name for span in spans if span.start <= at < span.end), "between steps"),
        sorted([one for one in users if one[1] > 0], key=lambda one: -one[1]),
        spans,
    )


def phase_spans(owned: Owned) -> list[PhaseSpan]:
    """Return what the host did, in order. The phase of the model is split into forward and backward."""
    names = {"clipping gradients": "clipping", "updating weights": "optimizer", "loading data": "data"}
    spans: list[PhaseSpan] = []
    for start, end, phase in owned.phases:
        if phase != "running the model":
            spans.append(PhaseSpan(start, end, names.get(phase, "other")))
            continue
        current: str = "forward"
        since = start
        for time, name in owned.turns:
            if start <= time < end and name != current:
                spans.append(PhaseSpan(since, time, current))
                current, since = name, time
        spans.append(PhaseSpan(since, end, current))
    return [span for span in spans if span.end > span.start]


def bytes_by_purpose(module: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> dict[str, int]:
    """Return the bytes of weights, optimizer state and gradients on this device."""
    parameters = list(module.parameters())
    state = [t for kept in optimizer.state.values() for t in kept.values() if isinstance(t, Tensor)]
    return {
        "weights": _bytes([*parameters, *module.buffers()], device),
        "optimizer state": _bytes(state, device),
        "gradients": _bytes([p.grad for p in parameters if p.grad is not None], device),
    }


def _bytes(tensors: Iterable[Tensor], device: torch.device) -> int:
    storages = {}
    for tensor in map(local_shard, tensors):
        if tensor.device.type == device.type:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def write_csv(timeline: Timeline, path: Path) -> None:
    """Write a line for each change: time in milliseconds of the window, allocated bytes, phase."""
    start, number = timeline.points[0][0], 0
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["ms", "bytes", "phase"])
        for time, size in timeline.points:
            while number < len(timeline.spans) - 1 and timeline.spans[number].end <= time:
                number += 1
            rows.writerow([f"{(time - start) / 1e6:.4f}", size, timeline.spans[number].name])


def memory_page(timeline: Timeline, title: str, sentences: Sequence[str]) -> str:
    """Return `memory.html`: memory over time with the phases of the steps, and what used it at the peak."""
    unit, name = (2**30, "GiB") if timeline.peak >= 2**30 else (2**20, "MiB")
    start = timeline.points[0][0]
    frame = html.Frame(
        width=1160,
        height=360,
        left=70,
        x_label=lambda ms: f"{ms:.4g} ms",
        x_whole=False,
        y_label=lambda size: f"{size / unit:.3g} {name}",
        tip_label=lambda size: f"{size / unit:.5g} {name}",
        y_from_zero=True,
    )
    chart = html.line_chart(
        "Allocated memory",
        [html.Series("allocated", [((time - start) / 1e6, size) for time, size in timeline.points])],
        frame,
        bands=[
            html.Band((s.start - start) / 1e6, (s.end - start) / 1e6, s.name, _COLORS.get(s.name, _OTHER))
            for s in timeline.spans
        ],
        mark=(timeline.peak_time - start) / 1e6,
    )
    users = [
        (
            html.escape(user),
            f"{size / unit:.3f} {name}",
            f"{size / timeline.peak:.1%}",
            html.share_bar(size / timeline.peak),
        )
        for user, size in timeline.users
    ]
    peak = f"{timeline.peak / unit:.3f} {name} at most, in {html.escape(timeline.peak_phase)}."
    about = f'<p class="soft">{peak} Time is that of the host, which allocates and frees.</p>'
    items = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in sentences)
    body = [
        f"<h1>{html.escape(title)}</h1>",
        html.section("What bounds the step", f"<ul>{items}</ul>"),
        html.section("Memory", about + chart),
        html.section("What used the memory at its peak", html.table(("by", "bytes", "share", ""), users)),
    ]
    return html.page(title, body)
