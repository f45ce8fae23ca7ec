"""Bind the threads of a process to CPU cores: read the topology of the machine, choose cores, set affinities.

Settings are read elsewhere (`cpu_affinity`). `/sys` and `/proc` are arguments, so that tests can imitate any machine.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tessera.errors import TesseraError, first_line

SYS, PROC = Path("/sys"), Path("/proc")
MIN_FINE_CORES = 5  # fine binding gives three threads a core each; all other threads need at least two cores
# Patterns of the names that torch gives to its threads.
_BACKWARD = re.compile(r"autograd")
_COLLECTIVE = re.compile(r"watchdg|heartbt|gloo|nccl|hccl")


@dataclass(frozen=True)
class Topology:
    """List the CPU cores of a machine and of each of its NUMA nodes."""

    online: frozenset[int]
    allowed: frozenset[int]  # cores that this process is allowed to use: taskset and control groups exclude some
    nodes: dict[int, frozenset[int]]  # NUMA node -> cores; one node if /sys does not list nodes


def parse_cores(text: str) -> frozenset[int]:
    """Parse a list of CPU cores in the kernel's notation, such as 0-3,8."""
    cores: set[int] = set()
    for span in text.strip().split(","):
        if span:
            first, _, last = span.partition("-")
            cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def format_cores(cores: Iterable[int]) -> str:
    """Format CPU cores in the kernel's notation: 0-3,8."""
    spans: list[list[int]] = []
    for core in sorted(cores):
        if spans and spans[-1][1] == core - 1:
            spans[-1][1] = core
        else:
            spans.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def read_topology(sys: Path = SYS, allowed: Iterable[int] | None = None) -> Topology:
    """Return the cores and NUMA nodes of this machine."""
    usable = frozenset(os.sched_getaffinity(0) if allowed is None else allowed)
    try:
        online = parse_cores((sys / "devices/system/cpu/online").read_text())
    except (OSError, ValueError):
        online = usable
    nodes: dict[int, frozenset[int]] = {}
    for folder in sorted((sys / "devices/system/node").glob("node[0-9]*")):
        try:
            cores = parse_cores((folder / "cpulist").read_text())
        except (OSError, ValueError):
            continue
        if cores:  # a NUMA node may have memory but no cores
            nodes[int(folder.name.removeprefix("node"))] = cores
    return Topology(online, usable, nodes or {0: online})


def numa_node(pci_address: str | None, sys: Path = SYS) -> int | None:
    """Return the NUMA node of a device; None if /sys does not list it."""
    if pci_address is None:
        return None
    try:
        node = int((sys / "bus/pci/devices" / pci_address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None  # the kernel writes -1 on a machine with a single NUMA node


def consecutive_cores(devices: int, topology: Topology) -> list[frozenset[int]]:
    """Divide the allowed CPU cores into consecutive ranges of equal size, one for each device.

    Cores that do not divide evenly stay unused. If there are fewer cores than devices, devices share cores.
    """
    return _split(topology.allowed, devices)


def numa_cores(nodes: Sequence[int | None], topology: Topology) -> list[frozenset[int]]:
    """Return the CPU cores of each device: devices on the same NUMA node split its cores evenly.

    Devices whose node is unknown are spread over the nodes in ascending order, as in most machines.
    """
    with_cores = [node for node, cores in sorted(topology.nodes.items()) if cores & topology.allowed] or [0]
    spread = [with_cores[number * len(with_cores) // len(nodes)] for number in range(len(nodes))]
    places = [node if node in with_cores else other for node, other in zip(nodes, spread, strict=True)]
    shares: dict[int, list[frozenset[int]]] = {}
    for node in set(places):
        usable = topology.nodes.get(node, frozenset()) & topology.allowed
        shares[node] = _split(usable or topology.allowed, places.count(node))
    return [shares[node].pop(0) for node in places]


def _split(cores: Iterable[int], parts: int) -> list[frozenset[int]]:
    ordered = sorted(cores)
    each = len(ordered) // parts
    if each == 0:
        return [frozenset({ordered[part * len(ordered) // parts]}) for part in range(parts)]
    return [frozenset(ordered[part * each : (part + 1) * each]) for part in range(parts)]


def overlaps(sets: Sequence[frozenset[int]]) -> list[tuple[int, int, frozenset[int]]]:
    """Return all pairs of devices that share CPU cores, and the shared cores."""
    return [
        (first, other, sets[first] & sets[other])
        for first in range(len(sets))
        for other in range(first + 1, len(sets))
        if sets[first] & sets[other]
    ]


class ThreadBinder:
    """Bind the threads of this process to CPU cores. Each call of `bind` binds the threads that are new since the last.

    Coarse binding: every thread can run on every core in `cores`. Fine binding: the thread that calls `bind` and queues
    the work, the thread of the backward pass and the threads of collectives get one core each; all other threads share
    the remaining cores.
    """

    def __init__(self, cores: Iterable[int], *, fine: bool = False, proc: Path = PROC) -> None:
        self.cores = tuple(sorted(cores))
        assert self.cores
        self.fine = fine and len(self.cores) >= MIN_FINE_CORES
        self._tasks = proc / "self" / "task"
        self._bound: set[int] = set()

    def bind(self) -> None:
        """Bind all threads that have started since the last call."""
        threads = {int(name) for name in os.listdir(self._tasks)}
        caller = threading.get_native_id()
        for thread in sorted(threads - self._bound):
            try:
                os.sched_setaffinity(thread, self.cores_of(self._name(thread), thread == caller))
            except ProcessLookupError:  # the thread has ended in the meantime
                continue
            except OSError as error:
                raise TesseraError(
                    f"this process is not allowed to use the CPU cores {format_cores(self.cores)}: {first_line(error)}",
                    fix=f"choose among the allowed cores: {format_cores(os.sched_getaffinity(0))}",
                    code="device.cores-not-allowed",
                ) from None
        self._bound = threads

    def cores_of(self, name: str, is_caller: bool) -> tuple[int, ...]:
        """Return the CPU cores for a thread of this name."""
        if not self.fine:
            return self.cores
        if is_caller:
            return self.cores[:1]
        if _BACKWARD.search(name):
            return self.cores[1:2]
        if _COLLECTIVE.search(name):
            return self.cores[2:3]
        return self.cores[3:]

    def _name(self, thread: int) -> str:
        try:
            return (self._tasks / str(thread) / "comm").read_text().strip()
        except OSError:
            return ""


def bind_children(cores: Iterable[int]) -> None:
    """Bind every process that is forked from now on to `cores`.

    Otherwise a worker of the data loader would inherit the single core of the thread that forks it.
    """
    chosen = frozenset(cores)
    os.register_at_fork(after_in_child=lambda: os.sched_setaffinity(0, chosen))
