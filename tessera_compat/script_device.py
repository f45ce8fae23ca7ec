"""Let a script that names one kind of accelerator run on the device that this machine has.

Scripts call `torch.cuda.set_device(rank)`, `.to("cuda")` and `init_process_group("nccl")`. On a machine without such a
device, these names select its accelerator, or the CPU with gloo, until the script ends. On a machine with the device
nothing is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tessera.runtime import device as devices
from tessera.runtime.log import logger
from tessera_compat.device_transfer import transferred


class DeviceNames(TorchFunctionMode):
    """Replace devices that this machine does not have, such as cuda, in the arguments of all torch operations."""

    def __init__(self, absent: frozenset[str], device: torch.device) -> None:
        super().__init__()
        self._absent = absent
        self._device = device

    def _mapped(self, value: Any) -> Any:
        if isinstance(value, torch.device):
            return self.present(value) if value.type in self._absent else value
        if isinstance(value, str) and value.partition(":")[0] in self._absent:
            return self.present(torch.device(value))
        return value

    def present(self, absent: torch.device) -> torch.device:
        """Return the device of this machine that replaces `absent`. An accelerator keeps the index of `absent`."""
        if self._device.type == "cpu" or absent.index is None:
            return self._device
        return torch.device(self._device.type, absent.index)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = {key: self._mapped(value) for key, value in (kwargs or {}).items()}
        if func is torch.device:
            return self._mapped(torch.device(*args, **(kwargs or {})))
        if func is Tensor.cuda and "cuda" in self._absent:
            return args[0].to(self._device)
        return func(*map(self._mapped, args), **named)


def _replacements(device: torch.device) -> dict[str, Callable[..., Any]]:
    """Return replacements of `torch.cuda` functions for the device of this machine."""
    module: Any = torch if device.type == "cpu" else torch.get_device_module(device)

    def set_device(index: int | str | torch.device) -> None:
        if device.type != "cpu":
            number = index if isinstance(index, int) else torch.device(index).index
            torch.accelerator.set_device_index(number or 0)

    def current_device() -> int:
        return 0 if device.type == "cpu" else torch.accelerator.current_device_index()

    def synchronize(index: Any = None) -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize()

    def get_rng_state(index: Any = None) -> Tensor:
        state: Tensor = module.get_rng_state()
        return state

    def set_rng_state(state: Tensor, index: Any = None) -> None:
        module.set_rng_state(state)

    return {
        "set_device": set_device,
        "current_device": current_device,
        "synchronize": synchronize,
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
    }


def _init_process_group(device: torch.device, original: Callable[..., None]) -> Callable[..., None]:
    """Return an `init_process_group` that replaces a missing backend by the backend of this device."""
    here = devices.backend(device, with_host=True)
    usable = {"gloo", devices.backend(device)}

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        names = {part.rpartition(":")[2] for part in (backend or "").split(",")} - {""}
        if names - usable:
            logger().info("backend %s is not on this machine; %s is used", backend, here)
            backend = here
        kwargs.pop("device_id", None)  # the device that the script passes is not on this machine
        original(backend, *args, **kwargs)

    return init_process_group


@contextmanager
def _replaced(module: ModuleType, functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    originals = {name: getattr(module, name) for name in functions}
    try:
        for name, function in functions.items():
            setattr(module, name, function)
        yield
    finally:
        for name, function in originals.items():
            setattr(module, name, function)


@contextmanager
def devices_of_this_machine() -> Iterator[None]:
    """Let scripts that are written for cuda run on the device of this machine, in this block."""
    device = devices.current()
    if device.type == "cuda":  # scripts are written for cuda: nothing to replace
        yield
        return
    logger().info("the script's device cuda means %s on this machine", device)
    if device.type != "cpu":
        with transferred(device):
            yield
        return
    absent = frozenset(devices.ACCELERATORS)
    own_group = {"init_process_group": _init_process_group(device, dist.init_process_group)}
    with (
        _replaced(torch.cuda, _replacements(device)),
        _replaced(dist, own_group),
        DeviceNames(absent, device),
    ):
        yield
