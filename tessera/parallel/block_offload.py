"""Keep frozen weights of blocks in host memory, and copy them to the device one block ahead of their use.

A block is wrapped inside of its recompute wrapper. Its weights are copied on a separate stream while the block before
it computes, in forward and in the recomputation of backward. After the block they are freed when autograd no longer
needs them. So the device has the weights of two blocks at a time. Nothing is copied back: frozen weights do not change.
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
    """Return the frozen weights of a block: buffers, such as quantized weights, and optionally frozen parameters.

    `parameters`: whether to include parameters. False with FSDP, which itself manages the parameters that it shards.
    """
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
    """Return for each block (bytes of parameters, bytes of buffers) that offload keeps in host memory.

    `stored`: dtype of parameters, except in the modules `float32`, whose parameters are float32.
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
    """Wrap blocks, in order of execution, so that their frozen weights stay in host memory."""
    order = BlockOrder(CopyStream(device), device)
    for path in paths:
        wrap_submodule(module, path, partial(HostBlock, order=order, parameters=parameters))


@contextmanager
def waiting_on_host(module: nn.Module, pin: bool) -> Iterator[None]:
    """Hide the offloaded weights of a meta model while the `with` block allocates all other weights.

    Then allocate the offloaded weights in host memory. `pin`: use pinned memory, so that copies are asynchronous.
    """
    blocks = [part for part in module.modules() if isinstance(part, HostBlock)]
    shapes = {(owner, name): getattr(owner, name) for block in blocks for owner, name in block.owners}
    for owner, name in shapes:
        setattr(owner, name, None)
    yield
    for (owner, name), meta in shapes.items():
        host = torch.empty_like(meta, device="cpu", pin_memory=pin)
        setattr(owner, name, nn.Parameter(host, requires_grad=False) if isinstance(meta, nn.Parameter) else host)


class BlockOrder:
    """Hold the offloaded blocks of a model in order of execution, and the index of the last block that ran."""

    def __init__(self, copies: CopyStream, device: torch.device) -> None:
        self.copies = copies
        self.device = device
        self.blocks: list[HostBlock] = []
        self._last = -1

    def next_after(self, number: int) -> HostBlock | None:
        """Return the block that runs after block `number`: the next block in forward, the previous one in backward."""
        backward, self._last = self._last >= number, number
        after = number - 1 if backward else number + 1
        return self.blocks[after] if 0 <= after < len(self.blocks) else None


class HostBlock(ActivationWrapper):
    """Run a block with device copies of its frozen weights."""

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
        # Pass the copies instead of setting `.data`: autograd then keeps those that backward needs.
        return functional_call(wrapped_module(self), weights, args, kwargs)

    def fetch(self) -> None:
        """Start to copy the weights to the device, unless a copy has been started already."""
        if self._copies:
            return
        for owner, name in self.owners:
            tensor = getattr(owner, name).detach()
            self._copies[owner, name] = self.order.copies.to_device(tensor, self.order.device)

    def _arrived(self, copies: Mapping[Owner, tuple[Tensor, torch.Event | None]]) -> dict[str, Tensor]:
        """Let the current stream wait for the copied weights, and return these by their name in the block."""
        names = {part: f"{path}." if path else "" for path, part in wrapped_module(self).named_modules()}
        weights: dict[str, Tensor] = {}
        for (owner, name), (copy, ready) in copies.items():
            if ready is not None:
                stream = torch.accelerator.current_stream(self.order.device)
                stream.wait_event(ready)
                copy.record_stream(stream)
            weights[names[owner] + name] = copy
        return weights
