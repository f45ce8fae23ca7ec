"""The norm of gradients, and the one factor that divides them by the global count and clips them. No host sync."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from tessera.core import device as devices
from tessera.core.tensors import local_part


def norm_and_factor(
    parameters: Iterable[Tensor],
    count: Tensor,
    max_norm: float | None,
    *,
    others: dist.ProcessGroup | None = None,
    counted_elsewhere: Collection[Tensor] = (),
) -> tuple[Tensor, Tensor]:
    """Of gradients of a summed loss: their norm divided by `count`, and by what to multiply them so that they are
    divided by it and clipped to `max_norm`.

    Gradients may lie elsewhere than `count` (in host memory, when they are offloaded): the results are where it is.
    `others`: ranks that hold other parameters of the same model. Of what several of them hold, one counts it.
    """
    elsewhere = {id(p) for p in counted_elsewhere}
    grads = [p.grad for p in parameters if p.grad is not None and id(p) not in elsewhere]
    norm = total_norm(grads, count.device, others) / count.clamp(min=1)
    factor = 1.0 / count.clamp(min=1)
    if max_norm is not None:
        factor = factor * torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    return norm, factor


def total_norm(
    grads: Iterable[Tensor], device: torch.device | None = None, others: dist.ProcessGroup | None = None
) -> Tensor:
    """2-norm over whatever axes the gradients are dealt out on: each is summed over just the axes that shard it.

    The result is on `device`; by default where the gradients are. `others` hold further gradients.
    """
    grads = list(grads)
    if device is None:
        device = local_part(grads[0]).device if grads else torch.device("cpu")
    by_layout: dict[tuple[object, tuple[Placement, ...]], list[Tensor]] = {}
    for grad in grads:
        key = (grad.device_mesh, tuple(grad.placements)) if isinstance(grad, DTensor) else (None, ())
        by_layout.setdefault(key, []).append(local_part(grad))
    wide = devices.sum_dtype(device)
    total = torch.zeros((), dtype=wide, device=device)
    for (mesh, placements), tensors in by_layout.items():
        norms = torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32))
        # Moved before it is summed over ranks: the axes of a mesh belong to the device, not to the host.
        squares = norms.to(device=device, dtype=wide).square().sum()
        for axis, placement in enumerate(placements):
            if not placement.is_replicate():  # a shard of shards does not call itself one
                dist.all_reduce(squares, group=mesh.get_group(axis))  # type: ignore[attr-defined]
        total += squares
    if others is not None:
        dist.all_reduce(total, group=others)
    return total.sqrt()
