"""Save activation memory: recompute activations in backward, or offload them to host memory.

In forward, an offloaded module's saved tensors are copied to the host on a separate stream. In backward, they are
copied back while the module that follows it in the model computes. Weights are not copied: FSDP frees and gathers them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tessera.parallel.modules import Keep, Recompute, wrap_submodule
from tessera.runtime import device as devices
from tessera.runtime.torch_internals import (
    ActivationWrapper,
    checkpoint_wrapper,
    tensor_identity,
    view_base,
    wrapped_module,
)

_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "linear", "convolution", "_scaled_mm", "_grouped_mm"})
_ATTENTION_WORD = "attention"  # a word that the names of all fused attention kernels contain
WORTH_MOVING = 64 << 10  # bytes; asynchronous offload leaves smaller tensors on the device


def apply_recompute(module: nn.Module, parts: Sequence[Recompute], use_reentrant: bool = False) -> None:
    """Wrap modules so that backward recomputes their activations."""
    for part in parts:
        wrap_submodule(module, part.path, partial(_wrapped, keep=part.keep, use_reentrant=use_reentrant))


def _wrapped(module: nn.Module, keep: Keep, use_reentrant: bool) -> nn.Module:
    if use_reentrant:
        return ReentrantRecompute(module)
    if keep == "none":
        return checkpoint_wrapper(module)
    return checkpoint_wrapper(module, context_fn=partial(create_selective_checkpoint_contexts, partial(_policy, keep)))


def _policy(keep: Keep, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = op.name().split("::")[-1].split(".")[0]
    stored = _ATTENTION_WORD in name or (keep == "matmul" and name in _PRODUCTS)
    return CheckpointPolicy.MUST_SAVE if stored else CheckpointPolicy.PREFER_RECOMPUTE


class ReentrantRecompute(ActivationWrapper):
    """Recompute with torch's reentrant checkpointing.

    With it, the output of a block requires a gradient only if an input does. So add an empty input that requires one:
    otherwise a trained block after a frozen block would get no gradients.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inner = wrapped_module(self)
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        trained = next((p for p in inner.parameters() if p.requires_grad), None)
        anchor = None if trained is None else torch.empty(0, device=trained.device, requires_grad=True)

        def run(_: Any, *inputs: Any) -> Any:
            return inner(*inputs, **kwargs)

        return checkpoint(run, anchor, *args, use_reentrant=True)


def apply_activation_offload(module: nn.Module, paths: Sequence[str], device: torch.device) -> None:
    """Wrap modules so that their activations are offloaded to host memory."""
    copies = CopyStream(device)
    for path in paths:
        wrap_submodule(module, path, partial(OffloadedModule, copies=copies))


class OffloadedModule(ActivationWrapper):
    """Run a module and keep its saved tensors in host memory."""

    def __init__(self, module: nn.Module, copies: CopyStream) -> None:
        super().__init__(module)
        self.copies = copies

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return wrapped_module(self)(*args, **kwargs)
        scope = self.copies.open_scope()
        with torch.autograd.graph.saved_tensors_hooks(scope.pack, OffloadScope.unpack):
            out = wrapped_module(self)(*args, **kwargs)
        scope.close()
        return out


class CopyStream:
    """Copy tensors between device and host on one stream, which all offloaded modules share."""

    def __init__(self, device: torch.device) -> None:
        self.asynchronous = devices.supports(device, "pinned_memory")
        self.smallest = WORTH_MOVING if self.asynchronous else 0
        self.stream = torch.Stream(device) if self.asynchronous else None
        self._last: weakref.ref[OffloadScope] | None = None

    def open_scope(self) -> OffloadScope:
        scope = OffloadScope(self, None if self._last is None else self._last())
        self._last = weakref.ref(scope)
        return scope

    def to_host(self, tensor: Tensor) -> Tensor:
        if self.stream is None:
            return tensor.clone()
        # The copy waits until the tensor is computed; the allocator must not reuse its memory before the copy ends.
        self.stream.wait_stream(torch.accelerator.current_stream(tensor.device))
        with self.stream:
            host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self.stream)
        return host

    def to_device(self, host: Tensor, device: torch.device) -> tuple[Tensor, torch.Event | None]:
        if self.stream is None:
            return host, None
        with self.stream:  # the stream of the copy to the host: the copy back runs after it
            tensor = torch.empty_like(host, device=device, pin_memory=False)
            tensor.copy_(host, non_blocking=True)
        return tensor, self.stream.record_event()


class OffloadScope:
    """Hold the saved tensors of one forward pass of an offloaded module, until autograd has freed all of them."""

    def __init__(self, copies: CopyStream, before: OffloadScope | None) -> None:
        self.copies = copies
        self.before = None if before is None else weakref.ref(before)
        self.tensors: list[weakref.ref[OffloadedTensor]] = []
        self._offloaded: dict[tuple[Any, ...], tuple[StorageWeakRef, OffloadedTensor]] = {}

    def pack(self, tensor: Tensor) -> Tensor | OffloadedTensor:
        if _is_weight(tensor) or tensor.numel() * tensor.itemsize < max(1, self.copies.smallest):
            return tensor
        key = tensor_identity(tensor)
        if key in self._offloaded:
            return self._offloaded[key][1]
        offloaded = OffloadedTensor(self, tensor)
        self.tensors.append(weakref.ref(offloaded))
        # `key` contains the storage's id. The weak reference keeps the id from being reused for another storage.
        self._offloaded[key] = (StorageWeakRef(tensor.untyped_storage()), offloaded)
        return offloaded

    def close(self) -> None:
        self._offloaded.clear()

    @staticmethod
    def unpack(saved: Tensor | OffloadedTensor) -> Tensor:
        return saved.open() if isinstance(saved, OffloadedTensor) else saved

    def fetch(self) -> None:
        for reference in self.tensors:
            offloaded = reference()
            if offloaded is not None:
                offloaded.fetch()


class OffloadedTensor:
    """Hold one saved tensor in host memory, and copy it back to the device."""

    def __init__(self, scope: OffloadScope, tensor: Tensor) -> None:
        self.scope = scope
        self.device = tensor.device
        self.host = scope.copies.to_host(tensor.detach())
        self._back: tuple[Tensor, torch.Event | None] | None = None

    def fetch(self) -> None:
        if self._back is None:
            self._back = self.scope.copies.to_device(self.host, self.device)

    def open(self) -> Tensor:
        self.fetch()
        before = self.scope.before() if self.scope.before is not None else None
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
    """Return whether a tensor is a parameter or a view of one (a linear layer saves its weight transposed)."""
    return isinstance(tensor, nn.Parameter) or isinstance(view_base(tensor), nn.Parameter)
