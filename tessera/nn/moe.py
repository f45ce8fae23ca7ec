"""Mixture of experts: a router, experts with stacked weights, and what keeps their loads even.

The router sees every token where it is. Tokens reach their experts through `Dispatch`, and numbers that belong to a
whole row are added up by `RowTotal`: both are modules without weights, so that they can be exchanged for others where
experts, or the tokens of a row, lie on several ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.core.types import IGNORE, Batch
from tessera.ops.moe import ExpertOrder, collect_rows, expert_mlp, spread_rows, weigh_choices
from tessera.ops.registry import AUTO

Scores = Literal["softmax", "sigmoid"]


@dataclass(frozen=True)
class MoEShape:
    hidden: int
    intermediate: int  # of one expert
    experts: int
    top_k: int
    scores: Scores = "softmax"
    normalize: bool = True  # the weights of a token's experts add up to one
    scale: float = 1.0  # of these weights
    balance: float = 0.0  # weight of the balance loss beside that of the trained tokens
    bias_rate: float = 0.0  # by how much a step moves the bias of an expert that got too many tokens, or too few
    implementation: str = AUTO  # of the experts' products


# ---------------------------------------------------------------------------------------------- rows


@dataclass(frozen=True)
class Rows:
    """Which tokens share a row. What is even is a row: it lies in one micro-batch whatever the layout, so that every
    split of a global batch balances alike.

    Padding does not count: it is a segment without any label that is trained on. All other tokens do, prompts too.
    """

    row: Tensor  # [T] int64: of each token
    counts: Tensor  # [T] bool: whether it is balanced
    trained: Tensor  # [R] fp32: labels of each row


class RowTotal(nn.Module):
    """Adds up over the ranks that share a row: alone, what is there. No gradient passes."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class TokenRows(nn.Module):
    """Reads the rows from a batch: as many as it has seeds. Where a rank has a part of a micro-batch's tokens,
    `token_index` [T] says which."""

    def __init__(self) -> None:
        super().__init__()
        self.row_total = RowTotal()

    @torch.no_grad()
    def forward(self, batch: Batch) -> Rows:
        labels, segments = batch["labels"], batch.segments["text"]
        index = batch.get("token_index")
        tokens = labels.shape[0]
        if index is None:
            index = torch.arange(tokens, device=labels.device)
        else:
            tokens = sum(segments.lengths)
        count, pieces = max(1, len(batch.seeds)), segments.bounds.shape[0] - 1
        row = index // (tokens // count)
        piece = torch.searchsorted(segments.bounds[1:], index.to(segments.bounds.dtype), right=True)
        trained = (labels != IGNORE).float()
        found = torch.zeros(count + pieces, device=labels.device)
        found = self.row_total(found.index_add(0, row, trained).index_add(0, count + piece, trained))
        return Rows(row, found[count:].index_select(0, piece) > 0, found[:count])


# ---------------------------------------------------------------------------------------------- choosing


class Balance(nn.Module):
    """Keeps loads even, by a loss or by a bias on the choice of experts (or both).

    The loss belongs to the whole model and not to one layer (see `balance_loss`): here a layer says how it used its
    experts. The bias is its own business.
    """

    bias: Tensor | None
    loads: Tensor | None

    def __init__(self, shape: MoEShape) -> None:
        super().__init__()
        self.coefficient = shape.balance
        self.rate = shape.bias_rate
        self.row_total = RowTotal()  # over all ranks that have tokens of a row
        self.part_total = RowTotal()  # over those of them that compute one loss together
        # On the host whatever the device of the moment is: these begin as zeros, and not as what the seed says.
        steered = shape.bias_rate > 0
        zeros = torch.zeros(shape.experts, device="cpu")
        self.register_buffer("bias", zeros if steered else None)
        self.register_buffer("loads", zeros.clone() if steered else None, persistent=False)

    def forward(self, out: Tensor, shares: Tensor, ids: Tensor, rows: Rows) -> tuple[Tensor, Tensor | None]:
        """`out` unchanged, and how the experts were used, [2, R, E]: how often each was chosen in each row, and the sum
        of its shares. The first is of whole rows and has no slope; of the second, each rank's own tokens have one."""
        counts = None
        if self.coefficient > 0 or (self.loads is not None and out.requires_grad):
            counts = self._choices(shares, ids, rows)
        if counts is None:
            return out, None
        if self.loads is not None and out.requires_grad:
            out = _CountLoads.apply(out, counts.sum(0), self.loads)  # type: ignore[no-untyped-call]
        if self.coefficient == 0:
            return out, None
        own = torch.zeros_like(counts).index_add(0, rows.row, shares.float() * rows.counts.unsqueeze(1))
        # Ranks that share the tokens of one loss all report the whole of it, and each has the slope of its own part.
        summed = own + (self.part_total(own.detach()) - own.detach())
        return out, torch.stack([self.row_total(counts), summed])

    @torch.no_grad()
    def _choices(self, shares: Tensor, ids: Tensor, rows: Rows) -> Tensor:
        """How often each expert was chosen in each row, [R, E], by the tokens that are here."""
        shape = (rows.trained.shape[0], shares.shape[1])
        counted = rows.counts.float().unsqueeze(1).expand_as(ids)
        where = rows.row.unsqueeze(1) * shape[1] + ids
        found = torch.zeros(shape, device=shares.device)
        return found.view(-1).index_add(0, where.flatten(), counted.flatten()).view(shape)


def balance_loss(used: Tensor, top_k: int, rows: Rows) -> Tensor:
    """From `used` [2, R, E], added up over the layers that have experts (see `Balance`): the balance loss of every row,
    weighted by the row's trained labels, as one sum.

    The loss of a row is experts x sum over e of (choices of e per token) x (mean share of e), both means over all
    layers and tokens of the row, as transformers pools them; k when all is even. After the one division by the global
    count it is a mean over trained tokens. What is pooled is a row and not a micro-batch, so that any split of a global
    batch gives the same gradient; transformers gives the same number for a micro-batch of one row.
    """
    chosen, shares = used
    tokens = (chosen.sum(1, keepdim=True) / top_k).clamp(min=1)  # times layers
    of_rows = chosen.shape[1] * (chosen / tokens * (shares / tokens)).sum(1)
    total: Tensor = (of_rows * rows.trained).sum()
    return total


class _CountLoads(torch.autograd.Function):
    """Counts loads when the backward pass comes by: recompute runs a forward pass twice, a backward pass never."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: Tensor, loads: Tensor) -> Tensor:
        ctx.counts, ctx.loads = counts, loads
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.loads += ctx.counts
        return grads[0], None, None


class Router(nn.Module):
    """Scores in fp32. `bias` [E] takes part in the choice of experts, not in their weights."""

    def __init__(self, shape: MoEShape) -> None:
        super().__init__()
        self.shape = shape
        self.weight = nn.Parameter(torch.empty(shape.experts, shape.hidden))

    def forward(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Of each token: its experts [T, k], their weights [T, k], and shares of all experts that add up to one."""
        shape = self.shape
        logits = F.linear(x.float(), self.weight.float())
        scores = logits.softmax(-1) if shape.scores == "softmax" else logits.sigmoid()
        ids = (scores.detach() if bias is None else scores.detach() + bias).topk(shape.top_k, dim=-1).indices
        weights = scores.gather(1, ids)
        if shape.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        shares = scores if shape.scores == "softmax" else scores / scores.sum(-1, keepdim=True)
        return ids, (weights * shape.scale).to(x.dtype), shares


# ---------------------------------------------------------------------------------------------- computing


class Dispatch(nn.Module):
    """Brings tokens to their experts, and back what these made of them. Here all experts are at hand."""

    def __init__(self, implementation: str = AUTO) -> None:
        super().__init__()
        self.implementation = implementation

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        at = ExpertOrder.of(ids, gate.shape[0])
        y = expert_mlp(spread_rows(x, at, ids.shape[1]), at.ends, gate, up, down, implementation=self.implementation)
        return weigh_choices(collect_rows(y, at), weights)


class Experts(nn.Module):
    """Gated MLPs of one shape, their weights stacked."""

    def __init__(self, shape: MoEShape) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(shape.experts, shape.intermediate, shape.hidden))
        self.up = nn.Parameter(torch.empty(shape.experts, shape.intermediate, shape.hidden))
        self.down = nn.Parameter(torch.empty(shape.experts, shape.hidden, shape.intermediate))
        self.dispatch = Dispatch(shape.implementation)
        self.top_k = shape.top_k

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """`x` [T, D] by the experts `ids` [T, k] of each token, added up by `weights` [T, k]."""
        out: Tensor = self.dispatch(x, ids, weights, self.gate, self.up, self.down)
        return out


class MoE(nn.Module):
    """In the place of an MLP. `shared` is one that all tokens pass through as well."""

    def __init__(self, shape: MoEShape, shared: nn.Module | None = None) -> None:
        super().__init__()
        self.router = Router(shape)
        self.experts = Experts(shape)
        self.balance = Balance(shape)
        self.shared = shared

    def forward(self, x: Tensor, rows: Rows | None = None) -> tuple[Tensor, Tensor | None]:
        """`rows` says what to balance; nothing, where nothing is trained. The second is for `balance_loss`: how the
        experts were used, where the model is trained to use them evenly."""
        ids, weights, shares = self.router(x, self.balance.bias)
        out: Tensor = self.experts(x, ids, weights)
        used = None
        if rows is not None:
            out, used = self.balance(out, shares, ids, rows)
        return (out if self.shared is None else out + self.shared(x)), used
