"""Account for the time of the profiled steps: each nanosecond counts once by owner and once by kind of work.

The owner of a host event is the module or the phase that caused it, also of a backward function. On an accelerator time
is that of the device. Where kernels run at the same time, computation hides copies, and both hide collectives, so an
entry is what the step would save without it. When nothing runs the device is idle, and the account names what the host
did meanwhile. On a CPU time is that of the thread which runs the step.
"""

from __future__ import annotations

import bisect
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tessera.observe.profile.recording import FORWARD, MODEL, PHASE, RECOMPUTE, DeviceEvent, HostEvent, Recording
from tessera.runtime.device import COLLECTIVE_BACKENDS

Direction = Literal["forward", "backward", "recompute", ""]

LOADING, CLIPPING, OPTIMIZER, LOSS = "data wait", "clipping", "optimizer", "loss and head"
GRADIENTS, ENGINE, BESIDE = "adding up gradients", "autograd itself", "beside the step"
BETWEEN, PAUSED = "callbacks", "evaluating and saving"
_PHASES = {
    "loading data": LOADING,
    "running the model": LOSS,  # what no module does: the task's inputs and the loss, with the head's product
    "clipping gradients": CLIPPING,
    "updating weights": OPTIMIZER,
    "reporting": BETWEEN,
    "agreeing to go on": BETWEEN,
    "starting": BETWEEN,
}
_EVALUATE = "autograd::engine::evaluate_function"
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")

PRODUCTS, ATTENTION, POINTWISE, REDUCTIONS = "matrix products", "attention", "norm and pointwise", "reductions"
COPIES, TRANSFERS, COLLECTIVES, OTHER = "copies", "host-device copies", "collectives", "other kernels"
PYTHON, IDLE, WAITING = "host alone (Python)", "device idle", "waiting for data"

_COLLECTIVE = "|".join(
    (*COLLECTIVE_BACKENDS, "c10d::", "_c10d_functional", "allreduce", "all_gather", "reduce_scatter")
)
# The first match counts. Names of device kernels and of host operations do not conflict, so one table serves both.
_RULES = tuple(
    (kind, re.compile(words, re.IGNORECASE))
    for kind, words in (
        (TRANSFERS, r"memcpy (?:htod|dtoh)|memcpy \w+ -> \w+ \((?:pinned|pageable)"),
        (COPIES, r"^memcpy|^memset"),
        (COLLECTIVES, _COLLECTIVE),
        (ATTENTION, r"flash|fmha|attention|sdpa|mha_|attn"),
        (
            PRODUCTS,
            r"gemm|gemv|cutlass|cublas|nvjet|xmma|wgmma|matmul|conv(?:olution|[123]d|_depthwise)|splitk|"
            r"^aten::(?:_scaled_|_grouped_)?(?:mm|addmm|bmm|baddbmm|linear|dot|mv|addmv|_addmm_activation|outer)$",
        ),
        (POINTWISE, r"triton_(?:poi|per|red|mix)|norm|gammabeta|softmax|gelu|silu|swiglu|sigmoid|rope"),
        (COPIES, r"copy|::cat$|catarray|index_select|gather|scatter|clone|contiguous|_to_copy|pin_memory"),
        (REDUCTIONS, r"reduce|^aten::(?:sum|mean|amax|amin|max|min|any|all|argmax|logsumexp|cumsum|sort|topk)$"),
        (POINTWISE, r"elementwise|vectorized|multi_tensor|foreach|fused_adam|adamw|fill|functor|^aten::\w+_?$"),
    )
)
_PRODUCT_SHAPES = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1, "aten::_addmm_activation": 1}


# ------------------------------------------------------------------------------------------ owners


@dataclass(frozen=True, slots=True)
class WorkOwner:
    """Name the module or the phase that time counts for: a row of the account's table.

    Layers of one list have the same owner: `text.layers.*.attn`.
    """

    name: str
    direction: Direction = ""

    def __str__(self) -> str:
        return f"{self.name}, {self.direction}" if self.direction else self.name


COMMUNICATION, MOVING, NOTHING = WorkOwner("communication"), WorkOwner(TRANSFERS), WorkOwner(IDLE)


@dataclass(frozen=True, slots=True)
class TimeSlice:
    """Hold a part of a thread's time with the innermost event of that time."""

    start: int
    end: int
    event: HostEvent
    owner: WorkOwner


@dataclass(frozen=True)
class Owned:
    """Hold host events with their owners."""

    by_id: dict[int, WorkOwner]
    names: dict[int, HostEvent]
    main: list[TimeSlice]  # of the thread that runs the step, or the one it waits for: without gap or overlap
    phases: list[tuple[int, int, str]]
    turns: list[tuple[int, Literal["forward", "backward"]]]  # times at which a part of forward or backward begins


def find_owners(host: list[HostEvent]) -> Owned:
    """Find the module or phase that caused each host event, and make the timeline of the thread that runs the step."""
    threads: dict[int, list[HostEvent]] = defaultdict(list)
    for event in host:
        threads[event.thread].append(event)
    for events in threads.values():
        events.sort(key=lambda event: (event.start, -event.end))
    phases = [(e.start, e.end, e.name.removeprefix(PHASE)) for e in host if e.name.startswith(PHASE)]
    main = next((e.thread for e in host if e.name.startswith(PHASE)), 0)
    made: dict[tuple[int, int], WorkOwner] = {}  # (thread, number of a node of the graph) -> owner of the forward call
    by_id: dict[int, WorkOwner] = {}
    slices: dict[int, list[TimeSlice]] = {thread: [] for thread in threads}
    # The thread of the step first: other threads run the backward functions of the nodes it made.
    for thread in sorted(threads, key=lambda one: one != main):
        _assign_thread(threads[thread], made, by_id, slices[thread])
    turns: list[tuple[int, Literal["forward", "backward"]]] = []
    turns += [(event.start, "forward") for event in host if event.name.startswith(FORWARD)]
    turns += [(event.start, "backward") for event in host if event.name.startswith(_EVALUATE)]
    working = [p for t in threads if t != main for p in slices[t] if p.owner.direction in ("backward", "recompute")]
    turns.sort()
    timeline = _assign_engine(_replace_waiting(slices.get(main, []), working), turns)
    return Owned(by_id, {e.id: e for e in host}, timeline, sorted(phases), turns)


def _replace_waiting(waiting: list[TimeSlice], working: list[TimeSlice]) -> list[TimeSlice]:
    """Replace waiting by the work it waits for: backward of an accelerator runs on another thread."""
    if not working:
        return waiting
    spans = merged((one.start, one.end) for one in working)
    return sorted([p for p, waits in split(waiting, spans) if not waits] + working, key=lambda p: p.start)


def _assign_engine(slices: list[TimeSlice], turns: list[tuple[int, Literal["forward", "backward"]]]) -> list[TimeSlice]:
    """Assign the time between two backward functions to the engine of autograd, not to the loss."""
    times = [time for time, _ in turns]
    out: list[TimeSlice] = []
    for one in slices:
        if one.owner.name == LOSS and one.event.name.startswith(PHASE):
            index = bisect.bisect_right(times, one.start)
            if 0 < index < len(turns) and turns[index - 1][1] == turns[index][1] == "backward":
                one = replace(one, owner=WorkOwner(ENGINE, "backward"))
        out.append(one)
    return out


def _assign_thread(
    events: list[HostEvent],
    made: dict[tuple[int, int], WorkOwner],
    by_id: dict[int, WorkOwner],
    slices: list[TimeSlice],
) -> None:
    stack: list[tuple[HostEvent, WorkOwner]] = []
    reached = events[0].start

    def go_to(time: int) -> None:
        nonlocal reached
        while stack and stack[-1][0].end <= time:
            event, owner = stack.pop()
            reached = _add(slices, reached, event.end, event, owner)
        if stack:
            reached = _add(slices, reached, time, *stack[-1])
        reached = max(reached, time)

    for event in events:
        go_to(event.start)
        owner = _owner(event, stack[-1][1] if stack else WorkOwner(BESIDE), made)
        if event.forward_thread == 0 and event.sequence >= 0:
            # An operation without a node has the number of the next one, so the last with a number made the node.
            made[event.thread, event.sequence] = owner
        by_id[event.id] = owner
        stack.append((event, owner))
    go_to(max(event.end for event in events))


def _add(slices: list[TimeSlice], start: int, end: int, event: HostEvent, owner: WorkOwner) -> int:
    if end > start:
        slices.append(TimeSlice(start, end, event, owner))
    return max(start, end)


def _owner(event: HostEvent, above: WorkOwner, made: dict[tuple[int, int], WorkOwner]) -> WorkOwner:
    name = event.name
    if name.startswith(FORWARD):
        return WorkOwner(_row(name.removeprefix(FORWARD)), "forward")
    if name.startswith(RECOMPUTE):
        return WorkOwner(_row(name.removeprefix(RECOMPUTE)), "recompute")
    if name.startswith(PHASE):
        phase = name.removeprefix(PHASE)
        return WorkOwner(_PHASES.get(phase, PAUSED), "forward" if phase == "running the model" else "")
    if event.forward_thread:
        maker = made.get((event.forward_thread, event.sequence))
        return above if maker is None else WorkOwner(maker.name, "backward")
    if name.startswith(_EVALUATE):
        return WorkOwner(GRADIENTS, "backward")
    return above


def _row(path: str) -> str:
    return path if path == MODEL else _NUMBER.sub("*", path)


def split(slices: list[TimeSlice], spans: list[tuple[int, int]]) -> Iterator[tuple[TimeSlice, bool]]:
    """Yield slices split where spans begin and end, with whether they lie in one."""
    number = 0
    for one in slices:
        start = one.start
        while number < len(spans) and spans[number][1] <= start:
            number += 1
        for at in range(number, len(spans)):
            low, high = spans[at]
            if low >= one.end:
                break
            if low > start:
                yield TimeSlice(start, low, one.event, one.owner), False
                start = low
            stop = min(high, one.end)
            yield TimeSlice(start, stop, one.event, one.owner), True
            start = stop
        if start < one.end:
            yield TimeSlice(start, one.end, one.event, one.owner), False


def merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    out: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((start, end))
    return out


# ------------------------------------------------------------------------------------------ the account


@dataclass
class WorkTime:
    """Hold the time of one owner or one kind of work."""

    ns: int = 0
    count: int = 0  # kernels on an accelerator, operations on a CPU
    flops: int = 0  # of matrix products whose shapes are known
    product_ns: int = 0  # that those took

    @property
    def rate(self) -> float | None:
        """Return the FLOP/s of the matrix products."""
        return self.flops / self.product_ns * 1e9 if self.flops and self.product_ns else None


@dataclass
class Account:
    """Hold the time of the window by owner and by kind of work."""

    steps: int
    accelerated: bool
    window_ns: int
    owners: dict[WorkOwner, WorkTime] = field(default_factory=lambda: defaultdict(WorkTime))
    kinds: dict[str, WorkTime] = field(default_factory=lambda: defaultdict(WorkTime))
    idle_while: dict[WorkOwner, int] = field(default_factory=lambda: defaultdict(int))  # what the host did
    launches: int = 0
    waits: int = 0
    hidden_collectives_ns: int = 0  # ran beside computation
    between_ns: int = 0  # of the model's time on a CPU: between operations

    def add(
        self, owner: WorkOwner, kind: str, *, ns: int = 0, count: int = 0, flops: int = 0, product_ns: int = 0
    ) -> None:
        """Add time and work to an owner and to a kind of work."""
        for time in (self.owners[owner], self.kinds[kind]):
            time.ns += ns
            time.count += count
            time.flops += flops
            time.product_ns += product_ns

    def share(self, *times: WorkTime) -> float:
        return sum(time.ns for time in times) / max(self.window_ns, 1)

    def owned_by(self, name: str) -> WorkTime:
        """Return the sum of all directions of an owner."""
        return add_up(time for owner, time in self.owners.items() if owner.name == name)

    def in_direction(self, direction: str) -> WorkTime:
        return add_up(time for owner, time in self.owners.items() if owner.direction == direction)


def add_up(times: Iterable[WorkTime]) -> WorkTime:
    total = WorkTime()
    for time in times:
        total.ns += time.ns
        total.count += time.count
        total.flops += time.flops
        total.product_ns += time.product_ns
    return total


def make_account(recording: Recording, owned: Owned, steps: int, accelerated: bool) -> Account:
    """Return the account of a recording. `accelerated`: time is that of the device."""
    begin, end = owned.phases[0][0], owned.phases[-1][1]
    if accelerated:
        end = max([end, *(event.end for event in recording.device)])
    account = Account(steps, accelerated, end - begin, waits=recording.waits)
    if accelerated:
        _by_device(account, recording, owned, begin, end)
    else:
        _by_host(account, recording, owned)
    return account


def _by_host(account: Account, recording: Recording, owned: Owned) -> None:
    counted: set[int] = set()
    for one, communicates in split(owned.main, merged(recording.collectives)):
        kind = kind_on_host(one.event.name)
        owner = one.owner
        if owner.name == LOADING:
            kind = WAITING
        elif kind == COLLECTIVES or (communicates and kind == PYTHON):
            kind, owner = COLLECTIVES, COMMUNICATION
        if kind == PYTHON and owner.direction:
            account.between_ns += one.end - one.start
        first = one.event.id not in counted
        counted.add(one.event.id)
        flops, ns = product_flops(one.event.name, one.event.shapes), one.end - one.start
        account.add(owner, kind, ns=ns, count=first, flops=first * flops, product_ns=ns if flops else 0)
        account.launches += first and one.event.name.startswith("aten::")


def _by_device(account: Account, recording: Recording, owned: Owned, begin: int, end: int) -> None:
    kinds = [kind_of(event.name) for event in recording.device]
    owners = [_device_owner(event, kind, owned) for event, kind in zip(recording.device, kinds, strict=True)]
    counted: set[int] = set()
    collectives_ns = 0
    for event, kind, owner in zip(recording.device, kinds, owners, strict=True):
        cause = owned.names.get(event.host)
        flops = 0 if cause is None or kind != PRODUCTS else product_flops(cause.name, cause.shapes)
        fresh = event.host not in counted
        if flops:
            counted.add(event.host)
        ns = event.end - event.start
        account.add(owner, kind, count=1, flops=fresh * flops, product_ns=ns if flops else 0)
        account.launches += 1
        collectives_ns += ns if kind == COLLECTIVES else 0
    priorities = [2 if kind == COLLECTIVES else 1 if kind in (TRANSFERS, COPIES) else 0 for kind in kinds]
    idle: list[tuple[int, int]] = []
    for start, stop, number in _exclusive(recording.device, priorities, begin, end):
        if number is None:
            idle.append((start, stop))
            continue
        account.add(owners[number], kinds[number], ns=stop - start)
    account.hidden_collectives_ns = max(0, collectives_ns - account.kinds[COLLECTIVES].ns)
    _idle(account, owned, idle)


def _device_owner(event: DeviceEvent, kind: str, owned: Owned) -> WorkOwner:
    if kind in (COLLECTIVES, TRANSFERS):
        return COMMUNICATION if kind == COLLECTIVES else MOVING
    return owned.by_id.get(event.host, WorkOwner("not known whose"))


def _exclusive(
    events: list[DeviceEvent], priorities: list[int], begin: int, end: int
) -> Iterator[tuple[int, int, int | None]]:
    """Yield (start, end, number of the event that the time counts for); None where nothing runs.

    Of several events that run, the one of the lowest priority number counts, then the earliest.
    """
    lasting = [(number, event) for number, event in enumerate(events) if event.end > event.start]
    changes = sorted(
        [(event.start, 1, number) for number, event in lasting] + [(event.end, 0, number) for number, event in lasting]
    )
    running: set[int] = set()
    reached = begin
    for time, starts, number in [*changes, (end, 0, -1)]:
        time = min(max(time, begin), end)
        if time > reached:
            chosen = min(running, key=lambda one: (priorities[one], events[one].start), default=None)
            yield reached, time, chosen
            reached = time
        if starts:
            running.add(number)
        else:
            running.discard(number)


def _idle(account: Account, owned: Owned, idle: list[tuple[int, int]]) -> None:
    total = sum(stop - start for start, stop in idle)
    for one, is_idle in split(owned.main, idle):
        if is_idle:
            account.idle_while[one.owner] += one.end - one.start
    loading = sum(ns for owner, ns in account.idle_while.items() if owner.name == LOADING)
    account.add(WorkOwner(LOADING), WAITING, ns=loading)
    account.add(NOTHING, IDLE, ns=total - loading)


# ------------------------------------------------------------------------------------------ kinds of work


def kind_of(name: str) -> str:
    return next((kind for kind, words in _RULES if words.search(name)), OTHER)


def kind_on_host(name: str) -> str:
    """Return the kind of a host event. What is no operation is Python between two operations."""
    known = name.startswith(("aten::", "c10d::", "_c10d")) or any(name.startswith(b) for b in COLLECTIVE_BACKENDS)
    if known:
        return kind_of(name)
    return POINTWISE if name.startswith(("triton_", "cpp_fused")) else PYTHON


def product_flops(name: str, shapes: Sequence[Any]) -> int:
    """Return multiplications and additions of a product; 0 where the shapes are unknown."""
    first = _PRODUCT_SHAPES.get(name)
    if first is None or len(shapes) < first + 2:
        return 0
    left, right = shapes[first], shapes[first + 1]
    if len(left) < 2 or len(right) < 2 or not all(isinstance(n, int) for n in (*left, *right)):
        return 0
    return int(2 * math.prod(left) * right[-1])
