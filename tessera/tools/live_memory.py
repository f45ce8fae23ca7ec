"""Count the bytes of live tensors during a step, also of fake tensors without memory."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from tessera.ops.fused_attention import WORKSPACES
from tessera.runtime.torch_internals import TorchDispatchMode, tree_leaves


class LiveMemory(TorchDispatchMode):
    """Count the tensors that operations create while this mode is active: activations, gradients, temporary tensors.

    Tensors that exist before, such as weights, are not counted. `most` is the peak in bytes. fully_shard resizes the
    storages of gathered weights without an operation that this mode sees, so the sizes of these storages are read again
    at every operation. Kernel workspaces that `ops` declares are added.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.most = 0
        self._references: dict[int, StorageWeakRef] = {}
        self._sizes: dict[int, int] = {}  # id of a counted storage -> bytes
        self._resized: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._filled: set[int] = set()  # ids of storages that FSDP may resize, and that have memory now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # torch then runs operations on local tensors, which this mode counts
        for leaf in tree_leaves([args, kwargs]):
            if isinstance(leaf, Tensor):
                self._meet(leaf, counted=False)
        self._look_again()
        out = func(*args, **(kwargs or {}))
        if (needed := WORKSPACES.get(func)) is not None:
            self.most = max(self.most, self.live + needed(args))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._meet(leaf, counted=True, resized=func is torch.ops.aten.empty.memory_format)
        return out

    def leave_out(self, tensor: Tensor) -> None:
        """Stop counting a tensor that a real run moves to the host."""
        number = StorageWeakRef(tensor.untyped_storage()).cdata
        self._filled.discard(number)
        self._resized.pop(number, None)
        self._set(number, 0)

    def _meet(self, tensor: Tensor, counted: bool, resized: bool = False) -> None:
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        number = reference.cdata
        if number in self._references:
            if number in self._resized:
                self._filled.add(number)
                self._set(number, storage.nbytes())
            return
        self._references[number] = reference  # while it exists, no other storage gets the same number
        weakref.finalize(storage, self._leave, number).atexit = False
        if counted:
            self._set(number, storage.nbytes())
            if resized:
                self._resized[number] = weakref.ref(storage)
                self._filled.add(number)

    def _look_again(self) -> None:
        """Subtract storages that FSDP has resized to zero since the last operation."""
        for number in list(self._filled):
            storage = self._resized[number]()
            if storage is not None and storage.nbytes() == 0:
                self._filled.discard(number)
                self._set(number, 0)

    def _set(self, number: int, size: int) -> None:
        self.live += size - self._sizes.get(number, 0)
        self._sizes[number] = size
        self.most = max(self.most, self.live)

    def _leave(self, number: int) -> None:
        self.live -= self._sizes.pop(number, 0)
        self._references.pop(number, None)
        self._resized.pop(number, None)
        self._filled.discard(number)
