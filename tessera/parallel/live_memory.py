"""Count the bytes of tensors that live during a step, also where tensors have shapes and no memory."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from tessera.core.torch_internals import TorchDispatchMode, tree_leaves


class LiveMemory(TorchDispatchMode):
    """Follow the tensors that operations make while the mode is on: activations, gradients and what is computed with.

    Tensors that were there before, such as weights, are not counted. `most` is the peak in bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.most = 0
        self._known: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what each rank computes of it comes here by itself
        for leaf in tree_leaves([args, kwargs]):
            if isinstance(leaf, Tensor):
                self._meet(leaf, counted=False)
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._meet(leaf, counted=True)
        return out

    def _meet(self, tensor: Tensor, counted: bool) -> None:
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        if reference.cdata in self._known:
            return
        size = storage.nbytes() if counted else 0
        self._known[reference.cdata] = reference  # keeps the number from being given to another storage
        weakref.finalize(storage, self._leave, reference.cdata, size).atexit = False
        self.live += size
        self.most = max(self.most, self.live)

    def _leave(self, number: int, size: int) -> None:
        self.live -= size
        self._known.pop(number, None)
