"""Read `CPU_AFFINITY_CONF` and bind a rank to CPU cores by it, on any device.

The grammar is that of torch on Ascend: comma-separated items without spaces, in any order.

    1                  mode 0 (off), 1 (coarse) or 2 (fine); also written mode:1
    npu0:0-2, npu0:5   cores of device 0, repeatable; gpu0 and device0 mean the same
    force:1            bind also to cores that taskset or a control group leaves out
    npu_affine:1       cores of the device's NUMA node, split among the devices of that node
    lazy_bind:0        bind at the start, so that worker processes of the loader are bound too; default 1: after the
                       first step, so that they are not

`bind_irq` has no effect. Unlike torch on Ascend, an item that cannot be parsed is an error, and a warning names cores
that two devices share.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from tessera.core.callback import Callback, StepResult, TrainerHandle
from tessera.errors import TesseraError, nearest
from tessera.runtime import log
from tessera_compat import affinity
from tessera_compat.affinity import ThreadBinder, Topology, format_cores

VARIABLE = "CPU_AFFINITY_CONF"
_SWITCHES = {"force": False, "npu_affine": False, "lazy_bind": True}
_IGNORED = ("bind_irq",)
_FORMS = ["1", "mode:1", "npu0:0-2", "npu0:5", *(f"{name}:0 or {name}:1" for name in _SWITCHES)]
_RANGE = re.compile(r"(?:npu|gpu|device)(\d{1,6}):(\d{1,6})(?:-(\d{1,6}))?")


@dataclass(frozen=True)
class AffinityConf:
    """Store the parsed value of `CPU_AFFINITY_CONF`."""

    mode: int = 0
    cores: Mapping[int, frozenset[int]] = field(
        default_factory=dict
    )  # device index -> its cores; devices that the value does not list are absent
    force: bool = False
    npu_affine: bool = False
    lazy_bind: bool = True


def parse_affinity(text: str) -> AffinityConf:
    """Parse the value of `CPU_AFFINITY_CONF`. An item that cannot be parsed raises an error."""
    mode: int | None = None
    cores: dict[int, frozenset[int]] = {}
    switches: dict[str, bool] = {}
    for item in text.split(",") if text else []:
        key, colon, value = item.partition(":")
        if match := _RANGE.fullmatch(item):
            device, first, last = int(match[1]), int(match[2]), int(match[3] or match[2])
            if last < first:
                _refuse(item, f"the range {first}-{last} is empty", fix=f"write {key}:{last}-{first}")
            cores[device] = cores.get(device, frozenset()) | frozenset(range(first, last + 1))
        elif (number := value if key == "mode" and colon else item).isascii() and number.isdigit():
            if len(number) > 6 or int(number) > 2:
                _refuse(item, f"there is no mode {number}", ["0 (off)", "1 (coarse)", "2 (fine)"])
            if mode is not None:
                _refuse(item, "a second mode", fix="name one mode")
            mode = int(number)
        elif key in (*_SWITCHES, *_IGNORED):
            if value not in ("0", "1"):
                _refuse(item, f"{key} is 0 or 1", [f"{key}:0", f"{key}:1"])
            if key in _SWITCHES:
                switches[key] = value == "1"
        elif item.strip() != item:
            _refuse(item, "white space", fix=f"write {VARIABLE} without spaces")
        else:
            _refuse(item, "not understood", _FORMS, near=nearest(key, ["mode", *_SWITCHES]))
    if mode is None and (cores or switches):
        raise TesseraError(
            "no item of the value is a mode (0, 1, 2 or mode:N), so no thread would be bound",
            where=f"{VARIABLE}={text}",
            fix=f"write {VARIABLE}=1,{text}",
            code="environment.affinity-without-mode",
        )
    return AffinityConf(mode or 0, cores, **{**_SWITCHES, **switches})


def _refuse(
    item: str, why: str, allowed: Sequence[str] | None = None, *, near: str | None = None, fix: str | None = None
) -> NoReturn:
    raise TesseraError(
        f"{item!r}: {why}", where=VARIABLE, allowed=allowed, nearest=near, fix=fix, code="environment.affinity-invalid"
    )


def cores_of_devices(conf: AffinityConf, nodes: Sequence[int | None], topology: Topology) -> list[frozenset[int]]:
    """Return the CPU cores of each device. `nodes`: the NUMA node of each device, None if unknown."""
    devices = len(nodes)
    chosen = affinity.numa_cores(nodes, topology) if conf.npu_affine else affinity.consecutive_cores(devices, topology)
    for device, cores in conf.cores.items():
        if device >= devices:
            raise TesseraError(
                f"cores are listed for device {device}, but this machine has {devices} devices",
                where=VARIABLE,
                allowed=[f"0 to {devices - 1}"],
                fix=f"remove npu{device}",
                code="environment.affinity-unknown-device",
            )
        if missing := cores - topology.online:
            raise TesseraError(
                f"cores {format_cores(missing)} are listed for device {device}, but this machine does not have them",
                where=VARIABLE,
                allowed=[format_cores(topology.online)],
                code="environment.affinity-unknown-core",
            )
        chosen[device] = cores
    return chosen


@dataclass(frozen=True)
class RankCores:
    """Store the CPU cores of one rank, and warnings about them."""

    cores: frozenset[int]  # empty if the threads are not bound
    warnings: tuple[str, ...] = ()


def cores_of_rank(conf: AffinityConf, device: int, nodes: Sequence[int | None], topology: Topology) -> RankCores:
    """Return the CPU cores of one device. There are none if `conf` lists cores that are not allowed."""
    sets = cores_of_devices(conf, nodes, topology)
    warnings = [
        f"{VARIABLE}: devices {first} and {other} share the cores {format_cores(both)}"
        for first, other, both in affinity.overlaps(sets)
        if conf.cores  # cores of the default, not of the value, are shared only on machines with too few cores
    ]
    outside = frozenset().union(*sets) - topology.allowed
    if outside and not conf.force:
        warnings.append(
            f"{VARIABLE}: no thread is bound: this process is not allowed to use the cores {format_cores(outside)}; "
            "force:1 tries to bind anyway"
        )
        return RankCores(frozenset(), tuple(warnings))
    cores = sets[device]
    if conf.mode == 2 and len(cores) < affinity.MIN_FINE_CORES:
        warnings.append(
            f"{VARIABLE}: {len(cores)} cores are too few for mode 2, which needs {affinity.MIN_FINE_CORES}: all "
            "threads share them"
        )
    return RankCores(cores, tuple(warnings))


class KeepThreadsBound(Callback):
    """Bind new threads of a rank to its CPU cores after each step."""

    def __init__(self, binder: ThreadBinder, children: frozenset[int]) -> None:
        self.binder = binder
        self.children = children
        self._began = False

    def on_step_end(self, trainer: TrainerHandle, result: StepResult) -> None:
        self.binder.bind()
        if not self._began:
            self._began = True
            log.logger().info("%s: bound to the cores %s", VARIABLE, format_cores(self.binder.cores))
            if self.binder.fine:
                affinity.bind_children(self.children)


def bind_rank(
    conf: AffinityConf, device: int, pci_addresses: Sequence[str | None], *, warn: bool = True
) -> list[Callback]:
    """Bind this process to its CPU cores. Return callbacks that bind threads which start later."""
    if conf.mode == 0:
        return []
    topology = affinity.read_topology()
    nodes = [affinity.numa_node(address) for address in pci_addresses]
    chosen = cores_of_rank(conf, device, nodes, topology)
    if warn:
        for warning in chosen.warnings:
            log.logger().warning("%s", warning)
    if not chosen.cores:
        return []
    if not conf.lazy_bind:
        # Coarse binding first, in both modes: threads and processes that start now inherit the cores of this thread.
        ThreadBinder(chosen.cores).bind()
    binder = ThreadBinder(chosen.cores, fine=conf.mode == 2)
    return [KeepThreadsBound(binder, topology.allowed if conf.lazy_bind else chosen.cores)]
