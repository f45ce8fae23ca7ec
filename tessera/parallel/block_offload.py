"""Block offload: frozen weights of a block wait in host memory, and come to the device one block ahead of their use.

A block is wrapped inside of its recompute wrapper. Before it computes, in forward and again when backward recomputes
it, its weights are copied to the device on a stream of their own, while the block before computes; afterwards the
module lets go of the copy, which then lives as long as what backward saved of it. So the device holds the weights of
two blocks at once. Nothing is copied back, since frozen weights do not change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from tessera.config.pattern import home
from tessera.parallel.activations import CopyStream
from tessera.parallel.modules import wrap_submodule
from tessera.runtime.modules import KeepsFrozenBuffers
from tessera.runtime.torch_internals import ActivationWrapper, wrapped_module

Owner = tuple[nn.Module, str]  # a module and the name of its parameter or buffer


def frozen_weights(block: nn.Module, parameters: bool) -> list[Owner]:
    """Return the frozen weights of a block that are unsharded on a rank. `parameters`: include parameters, not buffers
    alone; fully_shard moves its parameters itself."""
    weights: list[Owner] = []
    for part in block.modules():
        if isinstance(part, KeepsFrozenBuffers):
            weights += [(part, name) for name in part.frozen_buffers]
        if parameters:
            weights += [(part, name) for name, p in part.named_parameters(recurse=False) if not p.requires_grad]
    return weights


def block_bytes(
    module: nn.Module, paths: Sequence[str], stored: torch.dtype, float32: Sequence[str], *, parameters: bool
) -> dict[str, tuple[int, int]]:
    """Return the bytes of parameters and of buffers of each block that will wait in host memory.

    `kept`: the type that parameters will have; `float32`: modules that keep this one.
    """
    sizes_of_blocks: dict[str, tuple[int, int]] = {}
    for path in paths:
        block = module.get_submodule(path)
        names = {part: name for name, part in block.named_modules(prefix=path)}
        sizes = [0, 0]
        for part, name in frozen_weights(block, parameters):
            tensor = getattr(part, name)
            if isinstance(tensor, nn.Parameter):
                width = 4 if home(f"{names[part]}.{name}", float32) is not None else stored.itemsize
                sizes[0] += tensor.numel() * width
            else:
                sizes[1] += tensor.nbytes
        sizes_of_blocks[path] = (sizes[0], sizes[1])
    return sizes_of_blocks


def apply_block_offload(module: nn.Module, paths: Sequence[str], device: torch.device, *, parameters: bool) -> None:
    """Wrap blocks, in order of execution, so that their frozen weights wait in host memory."""
    order = BlockOrder(CopyStream(device), device)
    for path in paths:
        wrap_submodule(module, path, partial(HostBlock, order=order, parameters=parameters))


@contextmanager
def waiting_on_host(module: nn.Module, pin: bool) -> Iterator[None]:
    """Take the weights that wait in host memory out of a model on the meta device, while the rest of it is allocated,
    and allocate them there. `pin`: in page-locked memory, from which copies need not be waited for."""
    blocks = [part for part in module.modules() if isinstance(part, HostBlock)]
    shapes = {(owner, name): getattr(owner, name) for block in blocks for owner, name in block.owners}
    for owner, name in shapes:
        setattr(owner, name, None)
    yield
    for (owner, name), meta in shapes.items():
        host = torch.empty_like(meta, device="cpu", pin_memory=pin)
        setattr(owner, name, nn.Parameter(host, requires_grad=False) if isinstance(meta, nn.Parameter) else host)


class BlockOrder:
    """Know the blocks of a model in order of execution, and which one ran last."""

    def __init__(self, copies: CopyStream, device: torch.device) -> None:
        self.copies = copies
        self.device = device
        self.blocks: list[HostBlock] = []
        self._last = -1

    def next_after(self, number: int) -> HostBlock | None:
        """Return the block that will be needed after block `number`, which is about to run: in backward, the one before
        it."""
        backward, self._last = self._last >= number, number
        after = number - 1 if backward else number + 1
        return self.blocks[after] if 0 <= after < len(self.blocks) else None


class HostBlock(ActivationWrapper):
    """Run a block with copies of its frozen weights, which are in host memory."""

    def __init__(self, module: nn.Module, order: BlockOrder, parameters: bool) -> None:
        super().__init__(module)
        self.order = order
        self.number = len(order.blocks)
        self.owners = frozen_weights(module, parameters)
        self._copies: dict[Owner, tuple[Tensor, torch.Event | None]] = {}
        order.blocks.append(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.fetch()
        following = self.order.next_after(self.number)
        copies, self._copies = self._copies, {}
        weights = self._arrived(copies)
        if following is not None:
            following.fetch()
        # Copies take the place of the weights, not of their data: what backward saves of a weight would go with it.
        return functional_call(wrapped_module(self), weights, args, kwargs)

    def fetch(self) -> None:
        """Begin to copy the weights to the device, unless that has begun."""
        if self._copies:
            return
        for owner, name in self.owners:
            tensor = getattr(owner, name).detach()
            self._copies[owner, name] = self.order.copies.to_device(tensor, self.order.device)

    def _arrived(self, copies: Mapping[Owner, tuple[Tensor, torch.Event | None]]) -> dict[str, Tensor]:
        """Return copies by the names of their weights inside the block, once they are there."""
        names = {part: f"{path}." if path else "" for path, part in wrapped_module(self).named_modules()}
        weights: dict[str, Tensor] = {}
        for (owner, name), (copy, ready) in copies.items():
            if ready is not None:
                stream = torch.accelerator.current_stream(self.order.device)
                stream.wait_event(ready)
                copy.record_stream(stream)
            weights[names[owner] + name] = copy
        return weights
