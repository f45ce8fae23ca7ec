"""Gradients of which several ranks hold a part, or weights that several ranks hold: summed once, when a step ends.

Two cases: a norm that saw a part of the tokens, or of the heads, on each of the ranks that compute a layer together,
and a table of tokens that the first and the last stage of a pipeline both have. Sharding over data ranks has sums of
its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tessera.core.tensors import local_part


class EndOfStep(Protocol):
    """What ranks do together when all passes of a step have run."""

    def sum(self) -> None: ...


@dataclass(frozen=True)
class SharedGradients:
    group: dist.ProcessGroup
    parameters: Sequence[Tensor]

    def sum(self) -> None:
        """One all-reduce per type: each is too small to be worth its own."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)  # every rank must take part
            by_dtype.setdefault(parameter.grad.dtype, []).append(local_part(parameter.grad))
        for grads in by_dtype.values():
            flat = torch.cat([grad.reshape(-1) for grad in grads])
            dist.all_reduce(flat, group=self.group)
            for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(total.view_as(grad))


def sum_shared(shared: Iterable[EndOfStep]) -> None:
    for part in shared:
        part.sum()
