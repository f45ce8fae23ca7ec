"""Place frozen components, such as VAEs and text encoders, on the pipeline stage that needs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from tessera.core.batch import Batch
from tessera.core.spec import Component, Residence
from tessera.core.task import Task
from tessera.errors import TesseraError
from tessera.parallel.mesh import FSDP, Axes, Mesh
from tessera.parallel.pipeline_plan import PipelinePlan


@dataclass(frozen=True)
class FrozenBytes:
    """Hold the memory in bytes that a frozen component, such as a VAE, takes on a rank, and which ranks have it."""

    size: int
    residence: Residence
    position: int | None = None  # pipeline position of the ranks that have it; None: all ranks

    def at(self, position: int) -> int:
        """Return the bytes on a rank at a position of the pipeline."""
        return self.size if self.position in (None, position) else 0


def frozen_bytes(module: nn.Module, component: Component, axes: Axes, pipeline: PipelinePlan | None) -> FrozenBytes:
    """Return the bytes of a component's parameters on a rank. `module`: on the meta device."""
    size = sum(p.numel() * p.element_size() for p in module.parameters())
    shared = -(-size // axes.size(FSDP)) if component.residence == "sharded" else size
    if pipeline is None or component.stage == "split":
        return FrozenBytes(shared, component.residence)
    return FrozenBytes(shared, component.residence, pipeline.owner[0 if component.stage == "first" else -1])


def place_frozen(module: nn.Module, residence: Residence, mesh: Mesh, device: torch.device) -> nn.Module:
    """Move a component from host memory to its residence: sharded, whole on the device, or left there.

    It is sharded over the FSDP ranks of its pipeline stage. Buffers are always on the device.
    """
    if residence == "sharded" and mesh.size(FSDP) > 1:
        for path in _layers(module):
            fully_shard(module.get_submodule(path).to(device), mesh=mesh.view(FSDP))
        fully_shard(module.to(device), mesh=mesh.view(FSDP))
        return module
    if residence != "offloaded":
        return module.to(device)
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, buffer.to(device))
    return module


def _layers(module: nn.Module) -> list[str]:
    """Return the members of the outermost `ModuleList`s: the layers, each an FSDP group."""
    lists = [path for path, part in module.named_modules() if isinstance(part, nn.ModuleList)]
    outer = [path for path in lists if not any(path.startswith(f"{other}.") for other in lists)]
    return [f"{path}.{number}" for path in outer for number, _ in enumerate(module.get_submodule(path).children())]


# ---------------------------------------------------------------------------------------------- over a pipeline


@dataclass(frozen=True)
class _Encoded:
    """Describe the new tensors of an encoded batch, so that other ranks can receive them."""

    batch: Batch  # the encoded batch, with its tensors on the meta device
    tensors: tuple[str, ...]  # names of the tensors that `Task.encode` added
    segments: tuple[str, ...]


def encode_on_one_rank(
    task: Task, batches: Sequence[Batch], group: dist.ProcessGroup, source: int, device: torch.device
) -> list[Batch]:
    """Run `Task.encode` on one rank of a group, and send the new tensors to the other ranks.

    Return the micro-batches on all ranks. Unchanged batches are not sent.
    """
    encoded: Sequence[Batch] = batches
    failure: TesseraError | None = None
    if group.rank() == source:
        try:
            encoded = task.encode(batches)
        except TesseraError as error:  # broadcast the error to the other ranks, so that they do not wait
            failure = error
    message: list[Any] = [failure or [_changes(*pair) for pair in zip(batches, encoded, strict=True)]]
    dist.broadcast_object_list(message, group=group, group_src=source)
    if isinstance(message[0], TesseraError):
        raise message[0]
    return [_sent(batch, change, group, source, device) for batch, change in zip(encoded, message[0], strict=True)]


def _changes(before: Batch, after: Batch) -> _Encoded | None:
    if after is before:
        return None
    tensors = [name for name, tensor in after.tensors.items() if before.get(name) is not tensor]
    segments = [name for name, segment in after.segments.items() if before.segments.get(name) is not segment]
    return _Encoded(after.to("meta"), tuple(tensors), tuple(segments))


def _sent(batch: Batch, change: _Encoded | None, group: dist.ProcessGroup, source: int, device: torch.device) -> Batch:
    """Send or receive the new tensors of an encoded batch, and return it."""
    if change is None:
        return batch
    sends = group.rank() == source
    encoded = batch if sends else change.batch

    def exchanged(tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous() if sends else torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        if tensor.numel():
            dist.broadcast(tensor, group=group, group_src=source)
        return tensor

    tensors = {name: exchanged(encoded.tensors[name]) for name in change.tensors}
    bounds = {name: exchanged(encoded.segments[name].bounds) for name in change.segments}
    return replace(
        encoded,
        tensors={name: tensors[name] if name in tensors else batch.tensors[name] for name in encoded.tensors},
        segments={
            name: replace(segment, bounds=bounds[name]) if name in bounds else batch.segments[name]
            for name, segment in encoded.segments.items()
        },
    )
