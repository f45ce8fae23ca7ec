"""Mixture of experts: a router, experts with stacked weights, and load balancing.

`Dispatch` sends tokens to their experts and `RowSum` sums values over a packed row. Both are modules without
weights, so that `parallel` can replace them where experts, or the tokens of a row, are sharded over ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.core.batch import IGNORE, Batch
from tessera.ops.moe import (
    NO_ADAPTERS,
    ExpertAdapters,
    ExpertOrder,
    LowRank,
    collect_rows,
    expert_mlp,
    spread_rows,
    weigh_choices,
)
from tessera.ops.registry import AUTO
from tessera.runtime.modules import EXPERT_WEIGHTS, ExpertBalance, RowStatistics, StackedExperts


@dataclass(frozen=True)
class MoEShape:
    hidden: int
    intermediate: int  # inner width of an expert
    experts: int
    top_k: int
    normalize: bool = True  # normalise the router weights of a token's experts to sum 1
    balance: float = 0.0  # coefficient of the balance loss
    implementation: str = AUTO  # implementation of grouped matrix products


# ---------------------------------------------------------------------------------------------- rows


@dataclass(frozen=True)
class RowIds:
    """Hold the packed row of each token.

    Experts are balanced per row: a row is always within one micro-batch, so every split of a global batch gives the
    same loss. Padding (segments without trained labels) does not count, prompts do.
    """

    row: Tensor  # [T] int64: row of each token
    counts: Tensor  # [T] bool: whether the token counts for the balance loss
    trained: Tensor  # [R] fp32: number of trained labels in each row


class RowSum(nn.Module):
    """Return the input, because a single rank has all tokens of a row.

    If several ranks share a row, `parallel` replaces this module by a sum over ranks without a gradient.
    """

    def forward(self, x: Tensor) -> Tensor:
        return x


class TokenRows(RowStatistics):
    """Find the row of each token of a batch. A batch has one row per seed.

    Under context parallelism a rank has some of the tokens; `token_index` [T] contains their positions.
    """

    def __init__(self) -> None:
        super().__init__()
        self.row_total = RowSum()

    @torch.no_grad()
    def forward(self, batch: Batch) -> RowIds:
        labels, segments = batch["labels"], batch.segments["text"]
        index = batch.get("token_index")
        tokens = labels.shape[0]
        if index is None:
            index = torch.arange(tokens, device=labels.device)
        else:
            tokens = sum(segments.lengths)
        count, segment_count = max(1, len(batch.seeds)), segments.bounds.shape[0] - 1
        row = index // (tokens // count)
        segment = torch.searchsorted(segments.bounds[1:], index.to(segments.bounds.dtype), right=True)
        trained = (labels != IGNORE).float()
        # Numbers of trained labels: first one for each row, then one for each segment.
        totals = torch.zeros(count + segment_count, device=labels.device)
        totals = self.row_total(totals.index_add(0, row, trained).index_add(0, count + segment, trained))
        return RowIds(row, totals[count:].index_select(0, segment) > 0, totals[:count])


# ---------------------------------------------------------------------------------------------- choosing


class Balance(ExpertBalance):
    """Compute a layer's statistics for the balance loss, which covers all layers (see `balance_loss`)."""

    def __init__(self, shape: MoEShape) -> None:
        super().__init__()
        self.coefficient = shape.balance
        self.row_total = RowSum()  # sums over all ranks that have tokens of the same row
        self.part_total = RowSum()  # sums over the tp ranks that split a sequence: each of them needs the full loss

    def forward(self, shares: Tensor, ids: Tensor, rows: RowIds) -> Tensor | None:
        """Return statistics [2, R, E]: how often each expert was chosen in each row, and its summed router
        probabilities.

        None if the coefficient of the loss is 0. The number of choices covers all ranks; the probabilities leave out
        other context-parallel ranks, whose losses are added. Samples without trained tokens are not counted.
        Gradients flow through the probabilities of this rank's tokens.
        """
        if self.coefficient == 0:
            return None
        counts = self._choices(shares, ids, rows)
        sums = torch.zeros_like(counts).index_add(0, rows.row, shares.float() * rows.counts.unsqueeze(1))
        # Each tp rank that has tokens of a sequence gets the value of all its tokens, but the gradient of its own ones.
        summed = sums + (self.part_total(sums.detach()) - sums.detach())
        return torch.stack([self.row_total(counts), summed])

    @torch.no_grad()
    def _choices(self, shares: Tensor, ids: Tensor, rows: RowIds) -> Tensor:
        """Return how often each expert was chosen in each row, [R, E], by the tokens of this rank."""
        shape = (rows.trained.shape[0], shares.shape[1])
        counted = rows.counts.float().unsqueeze(1).expand_as(ids)
        where = rows.row.unsqueeze(1) * shape[1] + ids
        zeros = torch.zeros(shape, device=shares.device)
        return zeros.view(-1).index_add(0, where.flatten(), counted.flatten()).view(shape)


def balance_loss(used: Tensor, top_k: int, rows: RowIds) -> Tensor:
    """Return the sum over rows of each row's balance loss times its number of trained labels.

    `used` [2, R, E] contains the statistics of `Balance`, summed over all layers with experts. The loss of a row is
    experts x sum over e of (choices of e per token) x (mean probability of e), with means over all layers and tokens of
    the row, as in transformers; it is k for an even load. The trainer later divides it by the number of trained tokens
    of the global batch. Statistics are per row and not per micro-batch, so any split of a global batch gives the same
    gradient. transformers returns the same number for a micro-batch of one row.
    """
    chosen, shares = used
    tokens = (chosen.sum(1, keepdim=True) / top_k).clamp(min=1)  # number of tokens of a row, times number of layers
    of_rows = chosen.shape[1] * (chosen / tokens * (shares / tokens)).sum(1)
    return (of_rows * rows.trained).sum()


class Router(nn.Module):
    """Choose experts by softmax probabilities in fp32."""

    def __init__(self, shape: MoEShape) -> None:
        super().__init__()
        self.shape = shape
        self.weight = nn.Parameter(torch.empty(shape.experts, shape.hidden))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the experts [T, k] of each token, their weights [T, k], and the probabilities [T, E] of all
        experts."""
        shape = self.shape
        shares = F.linear(x.float(), self.weight.float()).softmax(-1)
        ids = shares.detach().topk(shape.top_k, dim=-1).indices
        weights = shares.gather(1, ids)
        if shape.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return ids, weights.to(x.dtype), shares


# ---------------------------------------------------------------------------------------------- computing


class Dispatch(nn.Module):
    """Send tokens to their experts and combine the outputs, if all experts are on this rank.

    Otherwise `parallel` replaces this module.
    """

    def __init__(self, implementation: str = AUTO) -> None:
        super().__init__()
        self.implementation = implementation

    def forward(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        gate: Tensor,
        up: Tensor,
        down: Tensor,
        beside: ExpertAdapters = NO_ADAPTERS,
    ) -> Tensor:
        at = ExpertOrder.of(ids, gate.shape[0])
        rows = spread_rows(x, at, ids.shape[1])
        inner, outer = (None if adapter is None else adapter.spread(at, ids.shape[1]) for adapter in beside)
        y = expert_mlp(rows, at.ends, gate, up, down, (inner, outer), implementation=self.implementation)
        return weigh_choices(collect_rows(y, at), weights)


class ExpertAdapter(nn.Module, ABC):
    """Base of adapters of stacked expert weights, which are children of `Experts`."""

    @abstractmethod
    def factors(self) -> LowRank | None:
        """Return the low-rank matrices A and B with their scale, or None if the adapter is disabled."""


class Experts(StackedExperts):
    """Hold gated MLPs of one shape with stacked weights.

    Adapters are added as children, under transformers' names of the weights.
    """

    adapted_weights = EXPERT_WEIGHTS
    gate_up_proj: ExpertAdapter | None
    down_proj: ExpertAdapter | None

    def __init__(self, shape: MoEShape) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(shape.experts, shape.intermediate, shape.hidden))
        self.up = nn.Parameter(torch.empty(shape.experts, shape.intermediate, shape.hidden))
        self.down = nn.Parameter(torch.empty(shape.experts, shape.hidden, shape.intermediate))
        self.dispatch = Dispatch(shape.implementation)
        self.top_k = shape.top_k
        for name in self.adapted_weights:
            self.register_module(name, None)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Return the outputs of experts `ids` [T, k] for `x` [T, D], summed with `weights` [T, k]."""
        inner = None if self.gate_up_proj is None else self.gate_up_proj.factors()
        outer = None if self.down_proj is None else self.down_proj.factors()
        return self.dispatch(x, ids, weights, self.gate, self.up, self.down, (inner, outer))


class MoE(nn.Module):
    """Replace an MLP by routed experts. `shared`: an MLP that all tokens use."""

    def __init__(self, shape: MoEShape, shared: nn.Module | None = None) -> None:
        super().__init__()
        self.router = Router(shape)
        self.experts = Experts(shape)
        self.balance = Balance(shape)
        self.shared = shared

    def forward(self, x: Tensor, rows: RowIds | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the output, and statistics for `balance_loss` if its coefficient is not 0.

        `rows`: see `RowIds`; None at inference.
        """
        ids, weights, shares = self.router(x)
        out: Tensor = self.experts(x, ids, weights)
        used = None if rows is None else self.balance(shares, ids, rows)
        return (out if self.shared is None else out + self.shared(x)), used
