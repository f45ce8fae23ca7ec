"""A recording of torch's profiler as plain lists: the only file that knows how torch keeps one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import profile

from tessera.core.device import COLLECTIVE_BACKENDS

_COLLECTIVES = tuple(f"{backend}:" for backend in COLLECTIVE_BACKENDS)


@dataclass(frozen=True, slots=True)
class HostEvent:
    """An operation or a named range on a thread of the host. Times are nanoseconds of one clock."""

    name: str
    thread: int
    start: int
    end: int
    id: int  # what it starts on the device refers to it
    sequence: int  # forward: number of the next node of the graph; backward: of the node that runs; -1: none
    forward_thread: int  # 0: not a backward function
    shapes: list[Any]


@dataclass(frozen=True, slots=True)
class DeviceEvent:
    """A kernel, a copy or a fill."""

    name: str
    start: int
    end: int
    host: int  # id of the host event that started it; 0: not known


@dataclass(frozen=True, slots=True)
class Allocation:
    time: int
    address: int
    size: int  # negative: freed
    total: int  # of the allocator, afterwards
    host: int  # id of the innermost host event; 0: none


@dataclass(frozen=True)
class Recording:
    host: list[HostEvent]
    device: list[DeviceEvent]
    allocations: list[Allocation] = field(default_factory=list)
    waits: int = 0  # times the host waited for the device
    collectives: list[tuple[int, int]] = field(default_factory=list)  # that run beside the host's threads


def read(recorded: profile, device: torch.device, memory: bool) -> Recording:
    assert recorded.profiler is not None
    results: Any = recorded.profiler.kineto_results
    host, on_device, collectives, waits = [], [], [], 0
    cpu = DeviceType.CPU
    for event in results.events():
        name = event.name()
        if name == "[memory]":  # told in more detail by the tree of events
            continue
        if event.device_type() != cpu:
            if not event.is_user_annotation():  # ranges of the host, drawn a second time
                end = event.start_ns() + event.duration_ns()
                on_device.append(DeviceEvent(name, event.start_ns(), end, event.linked_correlation_id()))
        elif event.linked_correlation_id():  # calls into the driver
            waits += "Synchronize" in name
        elif name.startswith(_COLLECTIVES):
            collectives.append((event.start_ns(), event.start_ns() + event.duration_ns()))
        elif not event.is_async():
            host.append(
                HostEvent(
                    name,
                    event.start_thread_id(),
                    event.start_ns(),
                    event.start_ns() + event.duration_ns(),
                    event.correlation_id(),
                    event.sequence_nr(),
                    event.fwd_thread_id(),
                    event.shapes(),
                )
            )
    return Recording(host, on_device, _allocations(results, device) if memory else [], waits, collectives)


def _allocations(results: Any, device: torch.device) -> list[Allocation]:
    found: list[Allocation] = []
    waiting = [(event, 0) for event in results.experimental_event_tree()]
    while waiting:
        event, above = waiting.pop()
        if event.tag.name == "Allocation":
            given = event.extra_fields
            if given.device.type == device.type:
                total = given.total_allocated or 0
                found.append(Allocation(event.start_time_ns, given.ptr or 0, given.alloc_size, total, above))
        else:
            above = event.correlation_id or above
        waiting += [(child, above) for child in event.children]
    return sorted(found, key=lambda one: one.time)
