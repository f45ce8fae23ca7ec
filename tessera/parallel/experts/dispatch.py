"""Tokens on their way to experts on other ranks, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tessera.ops.moe import ExpertOrder, collect_rows, expert_mlp, spread_rows, weigh_choices


class RankDispatch(nn.Module):
    """In the place of a dispatch that has all experts at hand: here a rank has some of them, or a slice of each.

    `dealt`: ranks among which experts are dealt, each with tokens of its own. How many go where is known on the device
    alone, and an exchange of uneven parts wants it on the host: one wait per layer and pass, the only one.
    `sliced`: ranks with a slice of every expert here; what each makes of a token adds up. They have the same tokens,
    or, with `sequence`, each a part of them that the others are given.
    """

    def __init__(
        self,
        implementation: str,
        dealt: dist.ProcessGroup | None = None,
        sliced: dist.ProcessGroup | None = None,
        sequence: bool = False,
    ) -> None:
        super().__init__()
        self.implementation = implementation
        self.dealt = dealt
        self.sliced = sliced
        self.sequence = sequence
        self.read_counts = read_counts  # exchanged in a dry run, which has nothing to read

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        stacks = [_local(stack) for stack in (gate, up, down)]
        if self.sliced is not None:
            enter = _Gather if self.sequence else _Enter
            x, weights = (_apply(enter, part, self.sliced) for part in (x, weights))
            ids = _gathered(ids, self.sliced) if self.sequence else ids
        at = ExpertOrder.of(ids, gate.shape[0])
        rows = spread_rows(x, at, ids.shape[1])
        y = self._compute(rows, at.ends, stacks) if self.dealt is None else self._exchange(rows, at, stacks, self.dealt)
        out = weigh_choices(collect_rows(y, at), weights)
        return out if self.sliced is None else _apply(_Scatter if self.sequence else _Leave, out, self.sliced)

    def _exchange(self, rows: Tensor, at: ExpertOrder, stacks: Sequence[Tensor], group: dist.ProcessGroup) -> Tensor:
        """In order of experts these rows are in order of ranks as well: each rank has a run of the experts."""
        ranks, here = group.size(), stacks[0].shape[0]
        sent = at.ends.diff(prepend=at.ends.new_zeros(1)).view(ranks, here)
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent, group=group)
        to_each, from_each = self.read_counts(torch.stack([sent.sum(1), got.sum(1)]), rows.shape[0])
        arrived = _apply(_Exchange, rows, group, to_each, from_each)
        # They come by rank, then by expert; they are wanted by expert.
        expert = torch.arange(here, device=rows.device).repeat(ranks)
        ids = expert.repeat_interleave(got.flatten(), output_size=arrived.shape[0])
        local = ExpertOrder.of(ids, here)
        y = collect_rows(self._compute(spread_rows(arrived, local, 1), local.ends, stacks), local)
        return _apply(_Exchange, y, group, from_each, to_each)

    def _compute(self, rows: Tensor, ends: Tensor, stacks: Sequence[Tensor]) -> Tensor:
        gate, up, down = stacks
        return expert_mlp(rows, ends, gate, up, down, implementation=self.implementation)


def read_counts(counts: Tensor, rows: int) -> tuple[list[int], list[int]]:
    """How many of the `rows` go to each rank, and how many come from each: [2, ranks], read on the host."""
    to_each, from_each = counts.tolist()
    return to_each, from_each


def _local(stack: Tensor) -> Tensor:
    """This rank's part: what its tokens (and those sent to it) teach is its gradient, whole."""
    return stack.to_local() if isinstance(stack, DTensor) else stack


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    out: Tensor = function.apply(*arguments)
    return out


class _Exchange(torch.autograd.Function):
    """Runs of rows to every rank of a group, and theirs from them. Runs may be empty."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: dist.ProcessGroup, to_each: Sequence[int], from_each: Sequence[int]
    ) -> Tensor:
        ctx.group, ctx.back = group, (from_each, to_each)
        return _all_to_all(x, group, to_each, from_each)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grads[0], ctx.group, *ctx.back), None, None, None


def _all_to_all(x: Tensor, group: dist.ProcessGroup, to_each: Sequence[int], from_each: Sequence[int]) -> Tensor:
    out = x.new_empty((sum(from_each), *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), list(from_each), list(to_each), group=group)
    return out


class _Enter(torch.autograd.Function):
    """The same tokens meet other slices on each rank: what these say of the tokens adds up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _sum(grads[0], ctx.group), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Gather(torch.autograd.Function):
    """Parts of the tokens become all of them on each rank; what the slices say of each goes back to its owner."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gathered(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _scattered(grads[0], ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _scattered(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _gathered(grads[0], ctx.group), None


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


def _scattered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty((x.shape[0] // group.size(), *x.shape[1:]))
    dist.reduce_scatter_tensor(out, x.contiguous(), group=group)
    return out


def _sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
