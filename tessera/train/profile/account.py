"""The account of a window: each nanosecond of its time is in one row by owner and in one row by kind of work.

On an accelerator time is the device's. Where kernels run side by side, computation hides copies, and both hide
collectives: what a row shows is what the step would save. When nothing runs the device is idle, and the account says
what the host did meanwhile. On a CPU time is that of the thread which runs the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tessera.train.profile import classes
from tessera.train.profile.classes import COLLECTIVES, COPIES, IDLE, PRODUCTS, TRANSFERS, WAITING
from tessera.train.profile.events import DeviceEvent, Recording
from tessera.train.profile.owners import LOADING, Owned, Owner, merged, split

COMMUNICATION, MOVING, NOTHING = Owner("communication"), Owner(TRANSFERS), Owner(IDLE)


@dataclass
class Row:
    ns: int = 0
    count: int = 0  # kernels on an accelerator, operations on a CPU
    flops: int = 0  # of matrix products whose shapes are known
    product_ns: int = 0  # that those took

    @property
    def rate(self) -> float | None:
        """FLOP/s of its matrix products."""
        return self.flops / self.product_ns * 1e9 if self.flops and self.product_ns else None


@dataclass
class Account:
    steps: int
    accelerated: bool
    window_ns: int
    owners: dict[Owner, Row] = field(default_factory=lambda: defaultdict(Row))
    kinds: dict[str, Row] = field(default_factory=lambda: defaultdict(Row))
    idle_while: dict[Owner, int] = field(default_factory=lambda: defaultdict(int))  # what the host did
    launches: int = 0
    waits: int = 0
    hidden_collectives_ns: int = 0  # ran beside computation
    between_ns: int = 0  # of the model's time on a CPU: between operations

    def share(self, *rows: Row) -> float:
        return sum(row.ns for row in rows) / max(self.window_ns, 1)

    def owned_by(self, name: str) -> Row:
        """All directions of an owner together."""
        return add_up(row for owner, row in self.owners.items() if owner.name == name)

    def going(self, direction: str) -> Row:
        return add_up(row for owner, row in self.owners.items() if owner.direction == direction)


def add_up(rows: Iterable[Row]) -> Row:
    total = Row()
    for row in rows:
        total.ns += row.ns
        total.count += row.count
        total.flops += row.flops
        total.product_ns += row.product_ns
    return total


def settle(recording: Recording, owned: Owned, steps: int, accelerated: bool) -> Account:
    begin, end = owned.phases[0][0], owned.phases[-1][1]
    if accelerated:
        end = max([end, *(event.end for event in recording.device)])
    account = Account(steps, accelerated, end - begin, waits=recording.waits)
    if accelerated:
        _by_device(account, recording, owned, begin, end)
    else:
        _by_host(account, recording, owned)
    return account


# ------------------------------------------------------------------------------------------ on a CPU


def _by_host(account: Account, recording: Recording, owned: Owned) -> None:
    counted: set[int] = set()
    waits = split(owned.main, merged(recording.collectives))
    for piece, communicates in waits:
        kind = classes.kind_on_host(piece.event.name)
        owner = piece.owner
        if owner.name == LOADING:
            kind = WAITING
        elif kind == COLLECTIVES or (communicates and kind == classes.PYTHON):
            kind, owner = COLLECTIVES, COMMUNICATION
        if kind == classes.PYTHON and owner.direction:
            account.between_ns += piece.end - piece.start
        first = piece.event.id not in counted
        counted.add(piece.event.id)
        flops = classes.product_flops(piece.event.name, piece.event.shapes)
        for row in (account.owners[owner], account.kinds[kind]):
            row.ns += piece.end - piece.start
            row.count += first
            row.flops += flops if first else 0
            row.product_ns += piece.end - piece.start if flops else 0
        account.launches += first and piece.event.name.startswith("aten::")


# ------------------------------------------------------------------------------------------ on an accelerator


def _by_device(account: Account, recording: Recording, owned: Owned, begin: int, end: int) -> None:
    kinds = [classes.kind_of(event.name) for event in recording.device]
    owners = [_device_owner(event, kind, owned) for event, kind in zip(recording.device, kinds, strict=True)]
    counted: set[int] = set()
    collectives_ns = 0
    for event, kind, owner in zip(recording.device, kinds, owners, strict=True):
        cause = owned.names.get(event.host)
        flops = 0 if cause is None or kind != PRODUCTS else classes.product_flops(cause.name, cause.shapes)
        fresh = event.host not in counted
        if flops:
            counted.add(event.host)
        for row in (account.owners[owner], account.kinds[kind]):
            row.count += 1
            row.flops += flops if fresh else 0
            row.product_ns += event.end - event.start if flops else 0
        account.launches += 1
        collectives_ns += event.end - event.start if kind == COLLECTIVES else 0
    ranks = [2 if kind == COLLECTIVES else 1 if kind in (TRANSFERS, COPIES) else 0 for kind in kinds]
    idle: list[tuple[int, int]] = []
    for start, stop, number in _exclusive(recording.device, ranks, begin, end):
        if number is None:
            idle.append((start, stop))
            continue
        account.owners[owners[number]].ns += stop - start
        account.kinds[kinds[number]].ns += stop - start
    account.hidden_collectives_ns = max(0, collectives_ns - account.kinds[COLLECTIVES].ns)
    _idle(account, owned, idle)


def _device_owner(event: DeviceEvent, kind: str, owned: Owned) -> Owner:
    if kind in (COLLECTIVES, TRANSFERS):
        return COMMUNICATION if kind == COLLECTIVES else MOVING
    return owned.by_id.get(event.host, Owner("not known whose"))


def _exclusive(
    events: list[DeviceEvent], ranks: list[int], begin: int, end: int
) -> Iterator[tuple[int, int, int | None]]:
    """Stretches of the window with the number of the one event each is given to: of those that run the lowest rank,
    then the earliest; None where nothing runs."""
    lasting = [(number, event) for number, event in enumerate(events) if event.end > event.start]
    turns = sorted(
        [(event.start, 1, number) for number, event in lasting] + [(event.end, 0, number) for number, event in lasting]
    )
    running: set[int] = set()
    reached = begin
    for time, starts, number in [*turns, (end, 0, -1)]:
        time = min(max(time, begin), end)
        if time > reached:
            chosen = min(running, key=lambda one: (ranks[one], events[one].start), default=None)
            yield reached, time, chosen
            reached = time
        if starts:
            running.add(number)
        else:
            running.discard(number)


def _idle(account: Account, owned: Owned, idle: list[tuple[int, int]]) -> None:
    total = sum(stop - start for start, stop in idle)
    for piece, is_idle in split(owned.main, idle):
        if is_idle:
            account.idle_while[piece.owner] += piece.end - piece.start
    loading = sum(ns for owner, ns in account.idle_while.items() if owner.name == LOADING)
    account.owners[Owner(LOADING)].ns += loading
    account.kinds[WAITING].ns += loading
    account.owners[NOTHING].ns += total - loading
    account.kinds[IDLE].ns += total - loading
