"""Answer every question about devices: names, capabilities, memory and speed. No other file names a kind of device."""

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

import torch
from torch.backends import cudnn
from torch.profiler import ProfilerActivity

from tessera.errors import TesseraError, first_line, nearest

log = logging.getLogger("tessera")

_BACKENDS = {"cuda": "nccl", "npu": "hccl", "cpu": "gloo"}
COLLECTIVE_BACKENDS = tuple(_BACKENDS.values())  # the words by which errors of collectives are known
ACCELERATORS = tuple(kind for kind in _BACKENDS if kind != "cpu")

# Dense bf16 matrix peak in FLOP/s as vendors state it, by a word in the device's name, most telling word first. Unknown
# devices report no peak, and MFU is left out.
_PEAKS = (
    ("H200", 989e12),
    ("H100", 989e12),
    ("H800", 989e12),
    ("GB300", 2500e12),  # before names that they contain
    ("GB200", 2500e12),
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
    """Hold bytes of memory: on an accelerator those of tensors, on a CPU the resident memory of this process."""

    used: int
    peak: int
    total: int


def _accelerator() -> str | None:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None else None


def resolve(name: str, local_rank: int = 0) -> torch.device:
    """Return the device of this process for `auto` or a device type; raise if it is not there."""
    kind = name
    if kind == "auto":
        kind = _accelerator() or "cpu"
    if kind not in _BACKENDS:
        raise TesseraError(
            f"unknown device: {name!r}",
            where="train.device",
            allowed=["auto", *_BACKENDS],
            nearest=nearest(name, _BACKENDS),
            code="device.unknown-name",
        )
    if kind == "cpu":
        return torch.device("cpu")
    if kind == "npu":
        _load_npu()
    if _accelerator() != kind:
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
    """Return the device on which this process computes now: that of its accelerator if there is one, or the CPU."""
    kind = _accelerator()
    return torch.device("cpu") if kind is None else torch.device(kind, torch.accelerator.current_device_index())


def is_accelerator(name: str) -> bool:
    """Return whether a value of `train.device` means an accelerator: "auto" if this machine has one, "cpu" never.

    Any other name counts as an accelerator, also where there is none of that type.
    """
    return _accelerator() is not None if name == "auto" else name.partition(":")[0] != "cpu"


def resolve_shared(name: str, local_rank: int) -> torch.device:
    """Return the device in a process group of the caller's, who may have shown each process only its own device, or
    may want several ranks on one."""
    kind = _accelerator() if name == "auto" else name
    if kind not in (None, "cpu") and _accelerator() == kind and torch.accelerator.device_count() == 1:
        local_rank = 0
    return resolve(name, local_rank)


def _load_npu() -> None:
    try:
        import torch_npu  # noqa: F401 - importing it is what makes torch know the device
    except ImportError:
        raise TesseraError(
            "device npu needs the package torch_npu", fix="pip install tessera-mm[npu]", code="device.no-torch-npu"
        ) from None


def backend(device: torch.device, with_host: bool = False) -> str:
    """Return the collective backend of a device, with that of the host beside it where checkpoints move host
    tensors."""
    name = _BACKENDS[device.type]
    if with_host and device.type != "cpu":
        return f"cpu:gloo,{device.type}:{name}"
    return name


def pci_addresses(ranks: int) -> list[str | None]:
    """Return the PCI addresses of this machine's devices, or None for each that does not tell its address. Without an
    accelerator each of the `ranks` on this machine counts as a device."""
    count = max(ranks, torch.accelerator.device_count())
    addresses: list[str | None] = [None] * count
    if _accelerator() == "cuda":
        for number in range(torch.accelerator.device_count()):
            properties: Any = torch.cuda.get_device_properties(number)
            with contextlib.suppress(AttributeError):  # older releases of torch do not tell
                addresses[number] = (
                    f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
                )
    return addresses


def binds_cores_itself() -> bool:
    """Return whether torch's extension for the accelerator reads CPU_AFFINITY_CONF and binds threads by itself."""
    return _accelerator() == "npu" or importlib.util.find_spec("torch_npu") is not None


# Of accelerators whose memory is counted on another machine: what decides which tensors a step keeps.
_COUNTED_ABILITIES = {
    "cuda": ("flash_attention", "tensor_cores", "wide_sums", "fused_optimizer", "grouped_mm", "triton")
}
_COUNTED: ContextVar[str | None] = ContextVar("counted", default=None)


@contextlib.contextmanager
def counted_as(name: str) -> Iterator[None]:
    """Answer `supports` for the CPU as the device of a value of `train.device` would, inside the block.

    For tensors without memory alone: operations then choose what they would choose there, and nothing is computed.
    """
    token = _COUNTED.set((_accelerator() or "cpu") if name == "auto" else name.partition(":")[0])
    try:
        yield
    finally:
        _COUNTED.reset(token)


def counted_for(device: torch.device) -> str | None:
    """Return the accelerator that tensors without memory on this device stand for (`counted_as`); mostly None.

    None for what is compiled as well: it is never a dry run, and the compiler cannot follow the question, so that the
    graph would break at every operation that asks.
    """
    if device.type != "cpu" or torch.compiler.is_compiling():
        return None
    counted = _COUNTED.get()
    return None if counted == "cpu" else counted


def supports(device: torch.device, what: str) -> bool:
    """Return whether a device has a capability that `ops` asks for by name. An unknown name is a programming error."""
    if what == "no_values":  # tensors of a dry run, whatever device they stand for
        return device.type == "cpu" and not torch.compiler.is_compiling() and _COUNTED.get() is not None
    counted = counted_for(device)
    if counted is not None:
        return what in _COUNTED_ABILITIES.get(counted, ())
    if what == "flash_attention":
        return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    if what == "cudnn_attention":  # at 1.9 times the speed of flash attention on these chips, slower on others
        return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9 and cudnn.is_available()
    if what == "wide_sums":  # products of half precision that are added to numbers of single precision
        return device.type == "cuda"
    if what == "tensor_cores":
        return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    if what == "triton":
        return supports(device, "tensor_cores") and _builds_kernels(device)
    if what == "pinned_memory":
        return device.type != "cpu"
    if what == "fused_optimizer":
        return device.type in ("cuda", "cpu")
    if what == "grouped_mm":
        return device.type in ("cuda", "cpu")
    raise AssertionError(f"unknown capability {what!r}")


@functools.cache
def _builds_kernels(device: torch.device) -> bool:
    """Return whether Triton is there and finds what it needs, a C compiler and Python's headers: many images lack
    them."""
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        from tessera.runtime.triton_probe import probe

        probe(device)
    except Exception as error:  # whatever Triton or the compiler has to say
        log.warning(
            "kernels of Tessera's own cannot be built here, so torch's are used, which are slower: %s; "
            "a C compiler and the headers of Python mend that (apt install gcc python3-dev)",
            first_line(error),
        )
        return False
    return True


def name(device: torch.device) -> str:
    if device.type == "cpu":
        return "CPU"
    return str(torch.get_device_module(device).get_device_name(device))


def profiler_activities(device: torch.device) -> list[ProfilerActivity]:
    """Return what torch's profiler records on this device."""
    activity = {"cuda": ProfilerActivity.CUDA, "npu": ProfilerActivity.PrivateUse1}.get(device.type)
    return [ProfilerActivity.CPU] if activity is None else [ProfilerActivity.CPU, activity]


def peak_flops(device: torch.device) -> float | None:
    """Return the stated dense bf16 peak; None if it is not known, so that no MFU is reported rather than a wrong
    one."""
    label = name(device)
    return next((peak for word, peak in _PEAKS if word in label), None)


def memory(device: torch.device) -> Memory:
    if device.type == "cpu":
        page = os.sysconf("SC_PAGE_SIZE")
        # Not ru_maxrss: a program begins with the peak of the process that started it.
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
    """Return whether a device had no memory left, by an error or by one that it was raised from."""
    while error is not None:
        said = isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)
        if said or isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__
    return False


def free_memory(device: torch.device) -> int:
    """Return how many bytes can be allocated without touching what this process has reserved already."""
    if device.type != "cpu":
        module: Any = torch.get_device_module(device)
        return int(module.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # not Linux
        return 0


@contextlib.contextmanager
def own_stream(device: torch.device, after: Any) -> Iterator[None]:
    """Queue what this thread does on a stream of its own, behind the event that `queued` gave to another thread."""
    if device.type == "cpu":
        yield
        return
    module: Any = torch.get_device_module(device)
    stream = module.Stream(device=device)
    stream.wait_event(after)
    with module.device(device), module.stream(stream):
        yield


def queued(device: torch.device) -> Any:
    """Return an event behind all that this thread has queued on an accelerator; None for the host."""
    if device.type == "cpu":
        return None
    module: Any = torch.get_device_module(device)
    event = module.Event()
    event.record(module.current_stream(device))
    return event


def reset_peak_memory(device: torch.device) -> None:
    """Begin a new peak for a run, whatever the process did before. A CPU process cannot reset its peak."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)


def has_unfinished_work(device: torch.device) -> bool:
    """Return whether an accelerator still computes what was queued on its default stream; any thread may ask. One
    that cannot answer now (it records a graph, for example) counts as working."""
    if device.type == "cpu":
        return False
    module: Any = torch.get_device_module(device)
    try:
        return not module.default_stream(device).query()
    except (RuntimeError, AttributeError):
        return True


def sum_dtype(device: torch.device) -> torch.dtype:
    """Return the widest type in which this device can add up scalars over ranks."""
    return torch.float32 if device.type == "npu" else torch.float64


class HostCopy:
    """Copy a few numbers to the host. They can be waited for without waiting for what was queued behind them."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values
        self._event: Any = None
        if values.device.type != "cpu":
            module: Any = torch.get_device_module(values.device)
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = module.Event()
            self._event.record(module.current_stream(values.device))

    def ready(self) -> bool:
        """Return whether a call would not have to wait."""
        return self._event is None or bool(self._event.query())

    def __call__(self) -> list[float]:
        if self._event is not None:
            self._event.synchronize()
        return list(self._values.tolist())


def send(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of these numbers on the device, without waiting for it."""
    tensor = torch.tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if supports(device, "pinned_memory") else tensor.to(device)


class SideCopies:
    """Copy from the host to an accelerator beside its computation, on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._stream = self._module.Stream(device=device)

    def start(self, copy: Callable[[], _T]) -> tuple[_T, Any]:
        """Run `copy` on the side stream; return its result and an event for `finish`."""
        with self._module.stream(self._stream):  # also makes the device this thread's
            copied = copy()
            done = self._module.Event()
            done.record(self._stream)
        return copied, done

    def finish(self, done: Any, tensors: Iterable[torch.Tensor]) -> None:
        """Order what this thread queues from now on behind the copy; the host does not wait."""
        current = self._module.current_stream(self._device)
        current.wait_event(done)
        for tensor in tensors:
            tensor.record_stream(current)  # so that its memory is not given away while this stream still reads it
