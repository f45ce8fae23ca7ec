"""Tokens on their way to experts on other ranks, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tessera.core.tensors import local_part
from tessera.ops.moe import ExpertOrder, collect_rows, expert_mlp, spread_rows, weigh_choices
from tessera.parallel.collectives import all_to_all, as_it_is, gathered, scattered, summed, with_backward


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
        # This rank's part: what its tokens (and those sent to it) teach is its gradient, whole.
        stacks = [local_part(stack) for stack in (gate, up, down)]
        if self.sliced is not None:
            x, weights = (with_backward(part, self._whole, self._summed) for part in (x, weights))
            ids = self._whole(ids)
        at = ExpertOrder.of(ids, gate.shape[0])
        rows = spread_rows(x, at, ids.shape[1])
        y = self._compute(rows, at.ends, stacks) if self.dealt is None else self._exchange(rows, at, stacks, self.dealt)
        out = weigh_choices(collect_rows(y, at), weights)
        return out if self.sliced is None else with_backward(out, self._summed, self._whole)

    def _whole(self, x: Tensor) -> Tensor:
        """Of the tokens that a rank has: of all that meet its slices."""
        assert self.sliced is not None
        return gathered(x, self.sliced) if self.sequence else as_it_is(x)

    def _summed(self, x: Tensor) -> Tensor:
        """Back from that, with what the slices of all ranks say of a token added up."""
        assert self.sliced is not None
        return scattered(x, self.sliced) if self.sequence else summed(x, self.sliced)

    def _exchange(self, rows: Tensor, at: ExpertOrder, stacks: Sequence[Tensor], group: dist.ProcessGroup) -> Tensor:
        """In order of experts these rows are in order of ranks as well: each rank has a run of the experts."""
        ranks, here = group.size(), stacks[0].shape[0]
        sent = at.ends.diff(prepend=at.ends.new_zeros(1)).view(ranks, here)
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent, group=group)
        to_each, from_each = self.read_counts(torch.stack([sent.sum(1), got.sum(1)]), rows.shape[0])
        arrived = all_to_all(rows, to_each, from_each, group)
        # They come by rank, then by expert; they are wanted by expert.
        expert = torch.arange(here, device=rows.device).repeat(ranks)
        ids = expert.repeat_interleave(got.flatten(), output_size=arrived.shape[0])
        own = ExpertOrder.of(ids, here)
        y = collect_rows(self._compute(spread_rows(arrived, own, 1), own.ends, stacks), own)
        return all_to_all(y, from_each, to_each, group)

    def _compute(self, rows: Tensor, ends: Tensor, stacks: Sequence[Tensor]) -> Tensor:
        gate, up, down = stacks
        return expert_mlp(rows, ends, gate, up, down, implementation=self.implementation)


def read_counts(counts: Tensor, rows: int) -> tuple[list[int], list[int]]:
    """How many of the `rows` go to each rank, and how many come from each: [2, ranks], read on the host."""
    to_each, from_each = counts.tolist()
    return to_each, from_each
