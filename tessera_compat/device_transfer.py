"""Replace names of torch so that `torch.cuda` and "cuda" devices mean the accelerator of this machine.

Libraries that have a branch of their own for this accelerator (transformers, accelerate, peft, trl, diffusers, torch
itself) still get torch's own answer to `torch.cuda.is_available()`, so that they take that branch. Names that a script
imported from torch before are not replaced.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.profiler import ProfilerActivity

from tessera.errors import TesseraError
from tessera.runtime import device as devices

FOREIGN = "cuda"
OWN_BRANCH = ("torch", "torch_npu", "transformers", "accelerate", "peft", "trl", "diffusers", "tessera")
_DEVICE_KEYS = ("device", "device_type", "map_location", "device_id", "device_ids")
# Functions of torch that take a device. `torch.device("cuda")` is not replaced: the functions translate its result.
_FUNCTIONS = (
    *("arange", "as_tensor", "asarray", "bartlett_window", "blackman_window", "empty", "empty_like"),
    *("empty_permuted", "empty_strided", "eye", "from_file", "full", "full_like", "hamming_window"),
    *("hann_window", "kaiser_window", "linspace", "load", "logspace", "normal", "ones", "ones_like"),
    *("rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm", "range"),
    *("scalar_tensor", "sparse_coo_tensor", "sparse_csr_tensor", "tensor", "tril_indices"),
    *("triu_indices", "zeros", "zeros_like", "set_default_device", "get_device_module"),
    *("get_autocast_dtype", "set_autocast_dtype", "is_autocast_enabled", "set_autocast_enabled"),
)
_TENSOR = ("to", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros", "pin_memory")
_ABSENT = object()


class Transfer:
    """Replace functions of torch so that "cuda" means another device (`start`), and restore them (`undo`)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kind = device.type
        self._replaced: list[tuple[Any, str, object]] = []

    @property
    def touched(self) -> tuple[str, ...]:
        """Return the replaced names, such as `torch.Tensor.cuda`."""
        return tuple(f"{_path(owner)}.{name}" for owner, name, _ in self._replaced)

    def start(self) -> None:
        if is_started():
            raise TesseraError(
                "torch.cuda already stands for another accelerator in this process",
                fix="import tessera_compat.transfer once, not together with torch_npu.contrib.transfer_to_npu, and "
                "not in a script that `tessera run` starts: that command replaces cuda, too",
                code="job.transfer-twice",
            )
        self._devices()
        self._cuda_module()
        self._collectives()
        self._profiler()

    def undo(self) -> None:
        while self._replaced:
            owner, name, before = self._replaced.pop()
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

    def _set(self, owner: Any, name: str, value: object) -> None:
        self._replaced.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    # ------------------------------------------------------------------------------------------ devices as arguments

    def _translated(self, value: Any) -> Any:
        if isinstance(value, torch.device) and value.type == FOREIGN:
            return torch.device(self._kind) if value.index is None else torch.device(self._kind, value.index)
        if isinstance(value, str) and re.fullmatch(rf"{FOREIGN}(:\d+)?", value):
            return value.replace(FOREIGN, self._kind)
        if type(value) in (list, tuple):
            return type(value)(map(self._translated, value))
        if type(value) is dict:  # torch.load takes a dict of devices as `map_location`
            return {self._translated(key): self._translated(entry) for key, entry in value.items()}
        return value

    def _wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that translates "cuda" in its arguments to this device, and calls `function`."""

        @functools.wraps(function)
        def translated(*args: Any, **kwargs: Any) -> Any:
            named = {key: self._translated(value) if key in _DEVICE_KEYS else value for key, value in kwargs.items()}
            # A positional list or tuple never contains devices: pass the original object.
            plain = (self._translated(value) if type(value) not in (list, tuple) else value for value in args)
            return function(*plain, **named)

        return translated

    def _wrap(self, owner: Any, *names: str) -> None:
        for name in names:
            if (function := getattr(owner, name, None)) is not None:
                self._set(owner, name, self._wrapped(function))

    def _devices(self) -> None:
        self._wrap(torch, *_FUNCTIONS)
        self._wrap(Tensor, *_TENSOR)
        self._wrap(nn.Module, "to", "to_empty")
        self._wrap(torch.random, "fork_rng")
        for owner in (torch.amp.autocast, torch.amp.GradScaler, nn.parallel.DistributedDataParallel):
            self._wrap(owner, "__init__")
        self._wrap(FullyShardedDataParallel, "__init__")
        self._wrap(torch.utils.data.DataLoader, "__init__")
        for name in ("Generator", "Event", "Stream"):
            self._set(torch, name, _class_like(getattr(torch, name), self._translated))
        kind = self._kind

        def tensor_cuda(tensor: Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> Tensor:
            return tensor.to(kind if device is None else device, non_blocking=non_blocking, **kwargs)

        def module_cuda(module: nn.Module, device: Any = None) -> nn.Module:
            return module.to(kind if device is None else device)

        self._set(Tensor, FOREIGN, tensor_cuda)
        self._set(nn.Module, FOREIGN, module_cuda)
        self._set(Tensor, "is_cuda", property(lambda tensor: tensor.device.type == kind))

    # ------------------------------------------------------------------------------------------ torch.cuda

    def _cuda_module(self) -> None:
        """Replace the public names of `torch.cuda` that the accelerator's module has, too."""
        here = torch.get_device_module(self._kind)
        for name in sorted(set(torch.cuda.__all__) & set(dir(here))):
            ours = getattr(here, name)
            if name.startswith("_") or inspect.ismodule(ours) or not callable(ours) or name == "is_available":
                continue
            self._set(torch.cuda, name, self._wrapped(ours) if inspect.isroutine(ours) else ours)
        for name in ("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all"):
            if hasattr(here, name):
                self._set(torch.cuda.random, name, self._wrapped(getattr(here, name)))
        torchs_own, available = torch.cuda.is_available, here.is_available

        def is_available() -> bool:
            frame = inspect.currentframe()
            caller = "" if frame is None or frame.f_back is None else frame.f_back.f_globals.get("__name__", "")
            return torchs_own() if caller.partition(".")[0] in OWN_BRANCH else bool(available())

        self._set(torch.cuda, "is_available", is_available)

    # ------------------------------------------------------------------------------------------ the rest

    def _collectives(self) -> None:
        if not dist.is_available():
            return
        backend, theirs = devices.backend(self._device), devices.backend(torch.device(FOREIGN))

        def word(value: Any) -> Any:
            return value.replace(theirs, backend).replace(FOREIGN, self._kind) if type(value) is str else value

        def renamed(function: Callable[..., Any], at: int) -> Callable[..., Any]:
            """Return a function that translates its argument `backend`, at position `at`, and calls `function`."""

            @functools.wraps(function)
            def with_backend(*args: Any, **kwargs: Any) -> Any:
                plain = [word(value) if number == at else value for number, value in enumerate(args)]
                named = {key: word(value) if key == "backend" else value for key, value in kwargs.items()}
                return self._wrapped(function)(*plain, **named)

            return with_backend

        for name, at in (("init_process_group", 0), ("new_group", 2), ("is_backend_available", 0)):
            self._set(dist, name, renamed(getattr(dist, name), at))
        self._set(dist, "is_nccl_available", lambda: True)
        self._wrap(dist, "init_device_mesh")
        self._wrap(dist.device_mesh, "init_device_mesh")
        self._wrap(dist.device_mesh.DeviceMesh, "__init__")

    def _profiler(self) -> None:
        """Let `ProfilerActivity.CUDA` record this accelerator."""
        start, present = torch.profiler.profile.__init__, devices.profiler_activities(self._device)

        @functools.wraps(start)
        def init(profile: Any, *args: Any, activities: Any = None, **kwargs: Any) -> None:
            if activities is not None:
                activities = [present[-1] if a is ProfilerActivity.CUDA else a for a in activities]
            start(profile, *args, activities=activities, **kwargs)

        self._set(torch.profiler.profile, "__init__", init)


def _class_like(original: type, translated: Callable[[Any], Any]) -> type:
    """Return a replacement for `original`, a class of torch whose methods cannot be replaced.

    A call of the replacement creates an object of `original` from translated arguments.
    """

    class Like(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return original(*map(translated, args), **{key: translated(value) for key, value in kwargs.items()})

        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, original)

        def __subclasscheck__(cls, kind: type) -> bool:
            return issubclass(kind, original)

    return Like(original.__name__, (), {"__doc__": original.__doc__, "__module__": __name__})


def _path(owner: Any) -> str:
    return owner.__name__ if inspect.ismodule(owner) else f"{owner.__module__}.{owner.__qualname__}"


def is_started() -> bool:
    """Return whether this module or torch_npu has replaced `torch.cuda` by the functions of another accelerator."""
    ours = getattr(torch.cuda.is_available, "__module__", "") == __name__
    return ours or "torch_npu.contrib.transfer_to_npu" in sys.modules


@contextmanager
def transferred(device: torch.device) -> Iterator[Transfer]:
    """Let "cuda" mean `device` in all of torch, inside the block."""
    transfer = Transfer(device)
    transfer.start()
    try:
        yield transfer
    finally:
        transfer.undo()
