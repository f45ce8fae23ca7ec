"""Activations that wait for backward in host memory.

What autograd would keep of a swapped module goes to the host as soon as it is made, on a stream of its own, and comes
back one swapped module ahead of its use. Weights stay: whoever owns them (fully_shard) frees and gathers them itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.multiprocessing.reductions import StorageWeakRef

from tessera.core import device as devices
from tessera.parallel.wrapping import wrap_submodule

WORTH_MOVING = 64 << 10  # bytes; below this, the copy to the host costs more than the memory is worth


def apply_swap(module: nn.Module, paths: Sequence[str], device: torch.device) -> None:
    lane = Lane(device)
    for path in paths:
        wrap_submodule(module, path, partial(Swapped, lane=lane))


class Swapped(ActivationWrapper):
    def __init__(self, module: nn.Module, lane: Lane) -> None:
        super().__init__(module)
        self.lane = lane

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._checkpoint_wrapped_module(*args, **kwargs)
        region = self.lane.open_region()
        with torch.autograd.graph.saved_tensors_hooks(region.pack, Region.unpack):
            out = self._checkpoint_wrapped_module(*args, **kwargs)
        region.close()
        return out


class Lane:
    """The way between a device and the host that all swapped modules of a model share."""

    def __init__(self, device: torch.device) -> None:
        self.asynchronous = devices.supports(device, "pinned_memory")
        self.smallest = WORTH_MOVING if self.asynchronous else 0
        self.stream = torch.Stream(device) if self.asynchronous else None
        self._last: weakref.ref[Region] | None = None

    def open_region(self) -> Region:
        region = Region(self, None if self._last is None else self._last())
        self._last = weakref.ref(region)
        return region

    def to_host(self, tensor: Tensor) -> Tensor:
        if self.stream is None:
            return tensor.clone()
        # The copy starts when what computes the tensor is done; its memory is reused only when the copy is done.
        self.stream.wait_stream(torch.accelerator.current_stream(tensor.device))
        with self.stream:
            host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self.stream)
        return host

    def to_device(self, host: Tensor, device: torch.device) -> tuple[Tensor, torch.Event | None]:
        if self.stream is None:
            return host, None
        with self.stream:  # in order behind the copy to the host, so that needs no waiting of its own
            tensor = torch.empty_like(host, device=device, pin_memory=False)
            tensor.copy_(host, non_blocking=True)
        return tensor, self.stream.record_event()


class Region:
    """One pass through one swapped module. It lives as long as autograd holds something that was saved in it."""

    def __init__(self, lane: Lane, before: Region | None) -> None:
        self.lane = lane
        self.before = None if before is None else weakref.ref(before)
        self.parcels: list[weakref.ref[Parcel]] = []
        self._seen: dict[tuple[Any, ...], tuple[StorageWeakRef, Parcel]] = {}

    def pack(self, tensor: Tensor) -> Tensor | Parcel:
        if _is_weight(tensor) or tensor.numel() * tensor.itemsize < max(1, self.lane.smallest):
            return tensor
        storage = tensor.untyped_storage()
        # The version tells an altered tensor from the one seen; the reference keeps the storage's number from reuse.
        key = (storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        if key in self._seen:
            return self._seen[key][1]
        parcel = Parcel(self, tensor)
        self.parcels.append(weakref.ref(parcel))
        self._seen[key] = (StorageWeakRef(storage), parcel)
        return parcel

    def close(self) -> None:
        self._seen.clear()

    @staticmethod
    def unpack(saved: Tensor | Parcel) -> Tensor:
        return saved.open() if isinstance(saved, Parcel) else saved

    def fetch(self) -> None:
        for reference in self.parcels:
            parcel = reference()
            if parcel is not None:
                parcel.fetch()


class Parcel:
    """One saved tensor on its way out and back."""

    def __init__(self, region: Region, tensor: Tensor) -> None:
        self.region = region
        self.device = tensor.device
        self.host = region.lane.to_host(tensor.detach())
        self._back: tuple[Tensor, torch.Event | None] | None = None

    def fetch(self) -> None:
        if self._back is None:
            self._back = self.region.lane.to_device(self.host, self.device)

    def open(self) -> Tensor:
        self.fetch()
        before = self.region.before() if self.region.before is not None else None
        if before is not None:
            before.fetch()
        assert self._back is not None
        tensor, ready = self._back
        if ready is not None:
            stream = torch.accelerator.current_stream(self.device)
            stream.wait_event(ready)
            tensor.record_stream(stream)
        return tensor


def _is_weight(tensor: Tensor) -> bool:
    """A parameter, or a view of one (a linear layer saves its weight transposed)."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
