"""Whose work it is: every host event gets the module or the phase that caused it, backward functions too."""

from __future__ import annotations

import bisect
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from tessera.train.profile.events import HostEvent
from tessera.train.profile.ranges import FORWARD, MODEL, PHASE, RECOMPUTE

Direction = Literal["forward", "backward", "recompute", ""]

LOADING, CLIPPING, OPTIMIZER, LOSS = "data wait", "clipping", "optimizer", "loss and head"
GRADIENTS, ENGINE, BESIDE = "adding up gradients", "autograd itself", "beside the step"
BETWEEN, PAUSED = "callbacks", "evaluating and saving"
_PHASES = {
    "loading data": LOADING,
    "running the model": LOSS,  # what no module does: the task's inputs and the loss, with the head's product
    "finishing gradients": CLIPPING,
    "updating weights": OPTIMIZER,
    "reporting": BETWEEN,
    "agreeing to go on": BETWEEN,
    "starting": BETWEEN,
}
_EVALUATE = "autograd::engine::evaluate_function"
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class Owner:
    """A row of the table. Layers of a tower share one: `text.layers.*.attn`."""

    name: str
    direction: Direction = ""

    def __str__(self) -> str:
        return f"{self.name}, {self.direction}" if self.direction else self.name


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a thread's time, and the innermost event it went to."""

    start: int
    end: int
    event: HostEvent
    owner: Owner


@dataclass(frozen=True)
class Owned:
    by_id: dict[int, Owner]
    names: dict[int, HostEvent]
    main: list[Piece]  # of the thread that runs the step, or the one it waits for: without gap or overlap
    phases: list[tuple[int, int, str]]
    turns: list[tuple[int, Literal["forward", "backward"]]]  # moments at which a part of either begins


def own(host: list[HostEvent]) -> Owned:
    threads: dict[int, list[HostEvent]] = defaultdict(list)
    for event in host:
        threads[event.thread].append(event)
    for events in threads.values():
        events.sort(key=lambda event: (event.start, -event.end))
    phases = [(e.start, e.end, e.name.removeprefix(PHASE)) for e in host if e.name.startswith(PHASE)]
    main = next((e.thread for e in host if e.name.startswith(PHASE)), 0)
    made: dict[tuple[int, int], Owner] = {}  # thread and number of a node of the graph -> who made it
    by_id: dict[int, Owner] = {}
    pieces: dict[int, list[Piece]] = {thread: [] for thread in threads}
    # The thread of the step first: others run backward functions of what it made.
    for thread in sorted(threads, key=lambda one: one != main):
        _sweep(threads[thread], made, by_id, pieces[thread])
    turns: list[tuple[int, Literal["forward", "backward"]]] = []
    turns += [(event.start, "forward") for event in host if event.name.startswith(FORWARD)]
    turns += [(event.start, "backward") for event in host if event.name.startswith(_EVALUATE)]
    working = [p for t in threads if t != main for p in pieces[t] if p.owner.direction in ("backward", "recompute")]
    turns.sort()
    timeline = _engine_apart(_instead(pieces.get(main, []), working), turns)
    return Owned(by_id, {e.id: e for e in host}, timeline, sorted(phases), turns)


def _instead(waiting: list[Piece], working: list[Piece]) -> list[Piece]:
    """An accelerator's backward runs on a thread of its own, while that of the step waits for it."""
    if not working:
        return waiting
    spans = merged((piece.start, piece.end) for piece in working)
    return sorted([p for p, waits in split(waiting, spans) if not waits] + working, key=lambda p: p.start)


def _engine_apart(pieces: list[Piece], turns: list[tuple[int, Literal["forward", "backward"]]]) -> list[Piece]:
    """Between two backward functions the host is in autograd's engine, not in the loss."""
    times = [time for time, _ in turns]
    out: list[Piece] = []
    for piece in pieces:
        if piece.owner.name == LOSS and piece.event.name.startswith(PHASE):
            place = bisect.bisect_right(times, piece.start)
            if 0 < place < len(turns) and turns[place - 1][1] == turns[place][1] == "backward":
                piece = replace(piece, owner=Owner(ENGINE, "backward"))
        out.append(piece)
    return out


def _sweep(
    events: list[HostEvent], made: dict[tuple[int, int], Owner], by_id: dict[int, Owner], pieces: list[Piece]
) -> None:
    stack: list[tuple[HostEvent, Owner]] = []
    reached = events[0].start

    def go_to(time: int) -> None:
        nonlocal reached
        while stack and stack[-1][0].end <= time:
            event, owner = stack.pop()
            reached = _add(pieces, reached, event.end, event, owner)
        if stack:
            reached = _add(pieces, reached, time, *stack[-1])
        reached = max(reached, time)

    for event in events:
        go_to(event.start)
        owner = _owner(event, stack[-1][1] if stack else Owner(BESIDE), made)
        if event.forward_thread == 0 and event.sequence >= 0:
            # Operations that make no node tell the number of the next one: the last to tell it is the one that made it.
            made[event.thread, event.sequence] = owner
        by_id[event.id] = owner
        stack.append((event, owner))
    go_to(max(event.end for event in events))


def _add(pieces: list[Piece], start: int, end: int, event: HostEvent, owner: Owner) -> int:
    if end > start:
        pieces.append(Piece(start, end, event, owner))
    return max(start, end)


def _owner(event: HostEvent, above: Owner, made: dict[tuple[int, int], Owner]) -> Owner:
    name = event.name
    if name.startswith(FORWARD):
        return Owner(_row(name.removeprefix(FORWARD)), "forward")
    if name.startswith(RECOMPUTE):
        return Owner(_row(name.removeprefix(RECOMPUTE)), "recompute")
    if name.startswith(PHASE):
        phase = name.removeprefix(PHASE)
        return Owner(_PHASES.get(phase, PAUSED), "forward" if phase == "running the model" else "")
    if event.forward_thread:
        maker = made.get((event.forward_thread, event.sequence))
        return above if maker is None else Owner(maker.name, "backward")
    if name.startswith(_EVALUATE):
        return Owner(GRADIENTS, "backward")
    return above


def _row(path: str) -> str:
    return path if path == MODEL else _NUMBER.sub("*", path)


def split(pieces: list[Piece], spans: list[tuple[int, int]]) -> Iterator[tuple[Piece, bool]]:
    """Pieces cut where spans begin and end, with whether they lie in one."""
    number = 0
    for piece in pieces:
        start = piece.start
        while number < len(spans) and spans[number][1] <= start:
            number += 1
        for at in range(number, len(spans)):
            low, high = spans[at]
            if low >= piece.end:
                break
            if low > start:
                yield Piece(start, low, piece.event, piece.owner), False
                start = low
            stop = min(high, piece.end)
            yield Piece(start, stop, piece.event, piece.owner), True
            start = stop
        if start < piece.end:
            yield Piece(start, piece.end, piece.event, piece.owner), False


def merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    out: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((start, end))
    return out
