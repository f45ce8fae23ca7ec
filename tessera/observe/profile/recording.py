"""Record steps with torch's profiler and return plain lists of events.

`Marks` names the module and the phase of a step in the recording. Only forward calls are marked: autograd numbers the
nodes that forward makes, and a backward function carries that number (see `account`). So nothing is added to the graph,
and a step computes the same numbers. `read` is the only function that knows how torch stores a recording.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.profiler import profile

from tessera.parallel.modules import wrap_submodule
from tessera.runtime.device import COLLECTIVE_BACKENDS
from tessera.runtime.modules import clean_name
from tessera.runtime.torch_internals import (
    ActivationWrapper,
    inside_backward,
    is_compiled,
    kineto_results,
    open_range,
    wrapped_module,
)

FORWARD, RECOMPUTE, PHASE = "tessera::forward ", "tessera::recompute ", "tessera::phase "
MODEL = "(model)"  # the outermost module's own work
_DEPTH = 3  # names of modules that lie in no block
_COLLECTIVES = tuple(f"{backend}:" for backend in COLLECTIVE_BACKENDS)


class Marks:
    """Mark the calls of modules and the phases of a step as ranges. `close` removes all marks."""

    def __init__(self, module: nn.Module, blocks: Iterable[str]) -> None:
        self._undo: list[Callable[[], None]] = []
        self._end_phase: Callable[[], None] | None = None
        for name, path, part in list(followed(module, set(blocks))):
            if not is_compiled(part):
                self._hook(path, part)
            elif name:
                self._wrap(module, name, path)

    def phase(self, phase: str) -> None:
        """End the range of the last phase and begin the one of a new phase."""
        if self._end_phase is not None:
            self._end_phase()
        self._end_phase = open_range(PHASE + phase)

    def close(self) -> None:
        if self._end_phase is not None:
            self._end_phase()
            self._end_phase = None
        for undo in reversed(self._undo):
            undo()
        self._undo = []

    def _hook(self, path: str, module: nn.Module) -> None:
        open_: list[Callable[[], None]] = []

        def enter(module: nn.Module, inputs: Any) -> None:
            open_.append(_open_call(path))

        def leave(module: nn.Module, inputs: Any, output: Any) -> None:
            if open_:
                open_.pop()()

        # First in and last out: what gathers and frees weights is a hook too, and belongs to the module.
        before = module.register_forward_pre_hook(enter, prepend=True)
        # Also after an error: recompute ends a forward pass by one as soon as it has what it needs.
        after = module.register_forward_hook(leave, always_call=True)
        self._undo += [before.remove, after.remove]

    def _wrap(self, root: nn.Module, name: str, path: str) -> None:
        """Put a module around a compiled one: hooks are compiled with it, so that new ones are not called."""
        wrap_submodule(root, name, lambda inner: MarkedCall(inner, path))
        self._undo.append(lambda: wrap_submodule(root, name, lambda marked: wrapped_module(cast(MarkedCall, marked))))


class MarkedCall(ActivationWrapper):
    """Call a compiled module inside a range of its name."""

    def __init__(self, module: nn.Module, path: str) -> None:
        super().__init__(module)  # type: ignore[no-untyped-call]
        self.path = path

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        end = _open_call(self.path)
        try:
            return wrapped_module(self)(*args, **kwargs)
        finally:
            end()


def _open_call(path: str) -> Callable[[], None]:
    # Within backward, forward runs only because something is computed again.
    return open_range((RECOMPUTE if inside_backward() else FORWARD) + path)


def followed(module: nn.Module, blocks: set[str]) -> Iterator[tuple[str, str, nn.Module]]:
    """Yield name, name without wrappers, and module, down to the parts of a block, elsewhere to a depth of three.

    Nothing below a compiled module is yielded.
    """
    closed: set[str] = set()
    for name, part in module.named_modules():
        if any(name.startswith(f"{above}.") for above in closed):
            continue
        if is_compiled(part):
            if not name:
                yield name, MODEL, part
                return
            closed.add(name)
        path = clean_name(f"{name}.").removesuffix(".")  # a wrapper stands for what it wraps
        if not path:
            yield name, MODEL, part
            continue
        block = _block_above(path, blocks)
        if block is None:
            if path.count(".") < _DEPTH:
                yield name, path, part
        elif path.count(".") <= block.count(".") + 1:
            yield name, path, part


def _block_above(path: str, blocks: set[str]) -> str | None:
    """Return the innermost block that is this module or contains it."""
    while path:
        if path in blocks:
            return path
        path = path.rpartition(".")[0]
    return None


@dataclass(frozen=True, slots=True)
class HostEvent:
    """Describe an operation or a named range on a thread of the host. Times are nanoseconds of one clock."""

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
    """Describe a kernel, a copy or a fill on the device."""

    name: str
    start: int
    end: int
    host: int  # id of the host event that started it; 0: not known


@dataclass(frozen=True, slots=True)
class Allocation:
    """Describe an allocation of memory, or that it was freed."""

    time: int
    address: int
    size: int  # negative: freed
    total: int  # of the allocator, afterwards
    host: int  # id of the innermost host event; 0: none


@dataclass(frozen=True)
class Recording:
    """Hold the events of the recorded steps."""

    host: list[HostEvent]
    device: list[DeviceEvent]
    allocations: list[Allocation] = field(default_factory=list)
    waits: int = 0  # times the host waited for the device
    collectives: list[tuple[int, int]] = field(default_factory=list)  # that run beside the host's threads


def read(recorded: profile, device: torch.device, memory: bool) -> Recording:
    """Return what torch's profiler recorded. `memory`: with the allocations on the device."""
    results = kineto_results(recorded)
    host, on_device, collectives, waits = [], [], [], 0
    for event in results.events():
        name = event.name()
        if name == "[memory]":  # the tree of events has more details
            continue
        if event.device_type().name != "CPU":
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
