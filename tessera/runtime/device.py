"""Query devices: names, capabilities, memory and speed. Only this file and `npu.py` contain names of device types."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch.backends import cudnn
from torch.profiler import ProfilerActivity

from tessera.errors import TesseraError, first_line, nearest
from tessera.runtime import npu
from tessera.runtime.torch_internals import generates_code, has_fused_adamw

log = logging.getLogger("tessera")

_BACKENDS = {"cuda": "nccl", "npu": "hccl", "cpu": "gloo"}
COLLECTIVE_BACKENDS = tuple(_BACKENDS.values())  # names of collective backends, as error messages contain them
ACCELERATORS = tuple(kind for kind in _BACKENDS if kind != "cpu")

# (part of the device name, dense bf16 peak in FLOP/s from the vendor's data sheet). The first match counts. For other
# devices no MFU is reported.
_PEAKS = (
    ("H200", 989e12),
    ("H100", 989e12),
    ("H800", 989e12),
    ("GB300", 2500e12),
    ("GB200", 2500e12),  # must precede B200, which is a substring of this name
    ("B200", 2250e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("4090", 165e12),
    ("Ascend910C", 752e12),
    ("Ascend910B", 376e12),
    ("Ascend910", 320e12),
)


_T = TypeVar("_T")


@dataclass(frozen=True)
class Memory:
    """Hold used memory in bytes: that of tensors on an accelerator, or the resident memory of this process on a CPU."""

    used: int
    peak: int
    total: int


def _accelerator() -> str | None:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None else None


def check_name(name: str) -> None:
    """Raise if no machine has a device with this value of `train.device`."""
    if name != "auto" and name not in _BACKENDS:
        raise _unknown(name)


def _unknown(name: str) -> TesseraError:
    return TesseraError(
        f"unknown device: {name!r}",
        where="train.device",
        allowed=["auto", *_BACKENDS],
        nearest=nearest(name, _BACKENDS),
        code="device.unknown-name",
    )


def resolve(name: str, local_rank: int = 0) -> torch.device:
    """Return the device of this process for a value of `train.device`; raise if this machine has none."""
    check_name(name)
    kind = name
    if kind == "auto":
        kind = _accelerator() or "cpu"
    if kind not in _BACKENDS:
        raise _unknown(kind)
    if kind == "cpu":
        return torch.device("cpu")
    if kind == "npu":
        npu.load()
    if _accelerator() != kind:
        if kind == "npu":
            raise npu.explained(None)
        raise TesseraError(
            f"this machine has no {kind} device that torch can use",
            where="train.device",
            allowed=["auto", "cpu"] + ([str(_accelerator())] if _accelerator() else []),
            fix="set train.device=auto, or install the torch build of that device",
            code="device.not-available",
        )
    count = torch.accelerator.device_count()
    if local_rank >= count:
        raise TesseraError(
            f"local rank {local_rank} has no device: this machine has {count}",
            fix=f"start at most {count} ranks here",
            code="device.too-many-ranks",
        )
    torch.accelerator.set_device_index(local_rank)
    return torch.device(kind, local_rank)


def current() -> torch.device:
    """Return the current accelerator device of this process, or the CPU."""
    kind = _accelerator()
    return torch.device("cpu") if kind is None else torch.device(kind, torch.accelerator.current_device_index())


def is_accelerator(name: str) -> bool:
    """Return whether a value of `train.device` means an accelerator.

    "auto": if this machine has one. "cpu": False. Any other name: True.
    """
    return _accelerator() is not None if name == "auto" else name.partition(":")[0] != "cpu"


def resolve_shared(name: str, local_rank: int) -> torch.device:
    """Return the device of a rank, for a process group that was made outside of Tessera.

    If the process sees one device only, that device is used for any local rank.
    """
    kind = _accelerator() if name == "auto" else name
    if kind not in (None, "cpu") and _accelerator() == kind and torch.accelerator.device_count() == 1:
        local_rank = 0
    return resolve(name, local_rank)


def backend(device: torch.device, with_host: bool = False) -> str:
    """Return the collective backend of a device. `with_host`: also that of the CPU, for checkpoints of host tensors."""
    name = _BACKENDS[device.type]
    if with_host and device.type != "cpu":
        return f"cpu:gloo,{device.type}:{name}"
    return name


def pci_addresses(ranks: int) -> list[str | None]:
    """Return the PCI address of each device of this machine, or None where it is unknown.

    Without an accelerator the list has `ranks` entries.
    """
    count = max(ranks, torch.accelerator.device_count())
    addresses: list[str | None] = [None] * count
    if _accelerator() == "cuda":
        for number in range(torch.accelerator.device_count()):
            properties: Any = torch.cuda.get_device_properties(number)
            with contextlib.suppress(AttributeError):  # older releases of torch lack these properties
                addresses[number] = (
                    f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
                )
    return addresses


def binds_cores_itself() -> bool:
    """Return whether torch_npu is installed, which binds threads to cores by CPU_AFFINITY_CONF."""
    return _accelerator() == "npu" or importlib.util.find_spec("torch_npu") is not None


# Accelerator -> capabilities that dry runs on a CPU assume: they determine which tensors a step keeps.
_COUNTED_ABILITIES = {
    "cuda": ("flash_attention", "tensor_cores", "wide_sums", "fused_optimizer", "grouped_mm", "triton", "compiler"),
    "npu": ("compiler",),  # a dry run cannot know the others: they depend on the packages of the NPU machine
}
_COUNTED: ContextVar[str | None] = ContextVar("counted", default=None)


@contextlib.contextmanager
def counted_as(name: str) -> Iterator[None]:
    """Inside of the `with` block, let `supports` return the capabilities of the device `name` for CPU tensors.

    With this, operations of a dry run on fake CPU tensors use the implementation for that device.
    """
    token = _COUNTED.set((_accelerator() or "cpu") if name == "auto" else name.partition(":")[0])
    try:
        yield
    finally:
        _COUNTED.reset(token)


def counted_for(device: torch.device) -> str | None:
    """Return the accelerator that `counted_as` simulates on the CPU; None outside of a dry run.

    In compiled code return None without reading the context variable, which would break the graph: dry runs do not
    compile.
    """
    if device.type != "cpu" or torch.compiler.is_compiling():
        return None
    counted = _COUNTED.get()
    return None if counted == "cpu" else counted


def supports(device: torch.device, what: str) -> bool:
    """Return whether a device has a capability, such as "cudnn_attention"; raise for an unknown one."""
    if what == "no_values":  # True in a dry run, whose tensors have no values
        return device.type == "cpu" and not torch.compiler.is_compiling() and _COUNTED.get() is not None
    counted = counted_for(device)
    if counted is not None:
        return what in _COUNTED_ABILITIES.get(counted, ())
    if what in ("flash_attention", "tensor_cores"):
        return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    if what == "cudnn_attention":  # on Hopper 1.9 times as fast as flash attention, slower elsewhere
        return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9 and cudnn.is_available()
    if what == "wide_sums":  # half-precision products accumulated into float32 tensors
        return device.type == "cuda"
    if what == "triton":
        return supports(device, "tensor_cores") and _builds_kernels(device)
    if what == "pinned_memory":
        return device.type != "cpu"
    if what == "graphs":
        return device.type == "cuda"
    if what == "ascend_kernels":
        return device.type == "npu"
    if what == "compiler":
        return device.type in ("cuda", "cpu") or generates_code(device.type)
    if what == "fused_optimizer":
        return device.type in ("cuda", "cpu") or has_fused_adamw()
    if what == "grouped_mm":
        return device.type in ("cuda", "cpu")
    raise AssertionError(f"unknown capability {what!r}")


@functools.cache
def _builds_kernels(device: torch.device) -> bool:
    """Return whether Triton can compile kernels: it needs a C compiler and Python's headers, which many images lack."""
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        from tessera.runtime.triton_probe import probe

        probe(device)
    except Exception as error:  # Triton and the compiler raise errors of any type
        log.warning(
            "Triton kernels cannot be compiled here, so slower kernels of torch are used: %s; "
            "install a C compiler and Python's headers (apt install gcc python3-dev)",
            first_line(error),
        )
        return False
    return True


def name(device: torch.device) -> str:
    if device.type == "cpu":
        return "CPU"
    return str(torch.get_device_module(device).get_device_name(device))


def profiler_activities(device: torch.device) -> list[ProfilerActivity]:
    """Return the activities that torch's profiler records on this device."""
    activity = {"cuda": ProfilerActivity.CUDA, "npu": ProfilerActivity.PrivateUse1}.get(device.type)
    return [ProfilerActivity.CPU] if activity is None else [ProfilerActivity.CPU, activity]


def peak_flops(device: torch.device) -> float | None:
    """Return the dense bf16 peak in FLOP/s; None if it is unknown."""
    label = name(device)
    return next((peak for word, peak in _PEAKS if word in label), None)


def memory(device: torch.device) -> Memory:
    if device.type == "cpu":
        page = os.sysconf("SC_PAGE_SIZE")
        # Do not use ru_maxrss: a process inherits its value from its parent.
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            status = dict(line.split(":", 1) for line in file if ":" in line)
        used, peak = (int(status[key].split()[0]) * 1024 for key in ("VmRSS", "VmHWM"))
        return Memory(used, peak, os.sysconf("SC_PHYS_PAGES") * page)
    total = torch.get_device_module(device).get_device_properties(device).total_memory
    return Memory(
        torch.accelerator.memory_allocated(device), torch.accelerator.max_memory_allocated(device), int(total)
    )


_OUT_OF_MEMORY = ("out of memory", "not enough memory", "can't allocate memory", "ALLOC_FAILED")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, reports that a device is out of memory."""
    while error is not None:
        said = isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)
        if said or isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__
    return False


def free_memory(device: torch.device) -> int:
    """Return the free memory of a device in bytes; 0 if it is unknown.

    Memory that torch's allocator has reserved is not free.
    """
    if device.type != "cpu":
        module: Any = torch.get_device_module(device)
        return int(module.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # other systems than Linux do not have this file
        return 0


@contextlib.contextmanager
def own_stream(device: torch.device, after: Any) -> Iterator[None]:
    """Run the `with` block on a new stream that waits for the event `after`, which another thread got from `queued`."""
    if device.type == "cpu":
        yield
        return
    module: Any = torch.get_device_module(device)
    stream = module.Stream(device=device)
    stream.wait_event(after)
    with module.device(device), module.stream(stream):
        yield


def queued(device: torch.device) -> Any:
    """Return an event that completes after all work queued so far on this thread's stream; None for the CPU."""
    if device.type == "cpu":
        return None
    module: Any = torch.get_device_module(device)
    event = module.Event()
    event.record(module.current_stream(device))
    return event


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak of allocated memory. On a CPU the peak of a process cannot be reset."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)


def has_unfinished_work(device: torch.device) -> bool:
    """Return whether the default stream of an accelerator has unfinished work. Any thread may call it.

    True if the stream cannot be queried now, for example while a graph is captured.
    """
    if device.type == "cpu":
        return False
    module: Any = torch.get_device_module(device)
    try:
        return not module.default_stream(device).query()
    except (RuntimeError, AttributeError):
        return True


def sum_dtype(device: torch.device) -> torch.dtype:
    """Return the widest dtype in which this device can all-reduce."""
    return torch.float32 if device.type == "npu" else torch.float64


class HostCopy:
    """Copy a small tensor to the host. Reading it waits only for the copy, not for work that was queued later."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values
        self._event: Any = None
        if values.device.type != "cpu":
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = queued(values.device)

    def ready(self) -> bool:
        """Return whether the copy has finished."""
        return self._event is None or bool(self._event.query())

    def __call__(self) -> list[float]:
        if self._event is not None:
            self._event.synchronize()
        return list(self._values.tolist())


def send(values: Sequence[float] | np.ndarray, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor with these numbers on the device. The host does not wait for the copy."""
    tensor = torch.tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if supports(device, "pinned_memory") else tensor.to(device)


def send_to(target: torch.Tensor, values: Sequence[float] | np.ndarray) -> None:
    """Copy these numbers into a tensor, after the work that is queued. The host does not wait for the copy."""
    tensor = torch.tensor(values, dtype=target.dtype)
    pinned = supports(target.device, "pinned_memory")
    target.copy_(tensor.pin_memory() if pinned else tensor, non_blocking=pinned)


class Graph:
    """Capture the kernels that a function launches as a CUDA graph, and launch them all again by one call."""

    def __init__(self, device: torch.device, run: Callable[[], torch.Tensor], pool: Any = None) -> None:
        """Run the function twice: to compile its kernels, then to capture them. `pool`: memory pool of
        another graph, to be shared. The output is then valid until either graph is launched."""
        with torch.cuda.device(device):
            side = torch.cuda.Stream(device)
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                run()
            torch.cuda.current_stream(device).wait_stream(side)
            torch.cuda.synchronize(device)
            self._graph = torch.cuda.CUDAGraph()
            # thread_local: other threads may use the device during the capture, for example to copy batches.
            with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
                self.output = run()
        self.pool = self._graph.pool()

    def launch(self) -> torch.Tensor:
        """Launch the kernels with the present contents of all tensors. The output is overwritten by the next launch."""
        self._graph.replay()
        return self.output


class SideCopies:
    """Copy tensors from the host to an accelerator on a separate stream, while it computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._stream = self._module.Stream(device=device)

    def start(self, copy: Callable[[], _T]) -> tuple[_T, Any]:
        """Run `copy` on the side stream; return its result and an event for `finish`."""
        with self._module.stream(self._stream):  # this also sets the current device of the thread
            copied = copy()
            done = self._module.Event()
            done.record(self._stream)
        return copied, done

    def finish(self, done: Any, tensors: Iterable[torch.Tensor]) -> None:
        """Let later work of this thread wait for the copy on the device; the host does not wait."""
        current = self._module.current_stream(self._device)
        current.wait_event(done)
        for tensor in tensors:
            tensor.record_stream(current)  # the memory must not be reused while this stream reads the tensor
