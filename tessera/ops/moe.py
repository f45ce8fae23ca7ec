"""Mixture of experts: tokens sorted by expert, and one matrix product per expert (grouped GEMM).

The number of tokens of each expert stays on the device, unless an implementation needs it on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.ops.linear import without_slots
from tessera.ops.pointwise import swiglu
from tessera.ops.registry import AUTO, DispatchedOp, Implementation
from tessera.ops.rows import permute_rows
from tessera.runtime.modules import local_shard

_ALIGNMENT = 16  # required alignment of a row in grouped kernels, in bytes


@dataclass(frozen=True)
class ExpertOrder:
    """Hold the permutation that sorts choices by expert. Token t has the choices t * k to t * k + k - 1."""

    order: Tensor  # [N] int64: index of the (token, expert) choice at each sorted position (argsort by expert)
    inverse: Tensor  # [N] int64: sorted position of each choice
    ends: Tensor  # [E] int32: end of each expert's choices when sorted

    @staticmethod
    def of(ids: Tensor, experts: int) -> ExpertOrder:
        """Return the order that sorts expert `ids` of any shape. Sorting is stable, so sums are deterministic."""
        ordered, order = ids.flatten().sort(stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
        every = torch.arange(experts, device=order.device, dtype=ordered.dtype)
        return ExpertOrder(order, inverse, torch.searchsorted(ordered, every, right=True, out_int32=True))


def spread_rows(x: Tensor, at: ExpertOrder, choices: int) -> Tensor:
    """Return `x` [T, D] as [T * choices, D] sorted by expert, with each token repeated for its experts."""
    return permute_rows(x, at.order, at.inverse, choices)


def collect_rows(y: Tensor, at: ExpertOrder) -> Tensor:
    """Return `y`, which is sorted by expert, in the order of choices."""
    return permute_rows(y, at.inverse, at.order)


def weigh_choices(y: Tensor, weights: Tensor) -> Tensor:
    """Return the sums [T, D] of `y` [T * k, D], in order of choices, weighted by `weights` [T, k]."""
    sums = torch.bmm(weights.unsqueeze(1).to(y.dtype), y.view(*weights.shape, y.shape[1]))
    # a sum over one entry: `squeeze` would return a view, which FSDP hooks of experts do not support
    return sums.sum(1)


class LowRank(NamedTuple):
    """Hold an adapter of stacked experts, which adds `scale` b[e] @ a[e] to the weights of expert e.

    Under tensor parallelism these are the local matrices: rows of b for row shards of the weights, columns of a for
    column shards. The adapter's output then has the placement of the layer's output on the rank.
    """

    a: Tensor  # [E, rank, in]
    b: Tensor  # [E, W, out, rank], for W weights that share `a`
    scale: float
    dropout: float = 0.0  # dropout of the input, with torch's default generator
    # If the low-rank dimension contains several adapters (slots): [T, slots] bool, True for slots that a token does not
    # use. None: all are used.
    others: Tensor | None = None

    def local(self) -> LowRank:
        """Return the adapter with this rank's shards of its matrices."""
        return self._replace(a=local_shard(self.a), b=local_shard(self.b))

    def spread(self, at: ExpertOrder, choices: int) -> LowRank:
        """Return the adapter with the rows of `others` repeated and sorted as `spread_rows` does it with tokens.

        The matrices stay as they are. `choices`: number of experts of a token.
        """
        return self if self.others is None else self._replace(others=self.others[at.order // choices])


ExpertAdapters = tuple[LowRank | None, LowRank | None]  # adapters of (gate and up), and of down
NO_ADAPTERS: ExpertAdapters = (None, None)


def expert_mlp(
    x: Tensor,
    ends: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    beside: ExpertAdapters = NO_ADAPTERS,
    *,
    implementation: str = AUTO,
) -> Tensor:
    """Return the gated MLP of each expert for its rows of `x` [N, D], which is sorted by expert.

    `ends` [E]: end of each expert's rows. `gate` and `up` are [E, I, D], `down` is [E, D, I]. `beside`: adapters of
    gate and up, and of down.
    """
    inner, outer = beside
    gated = grouped_linear(x, gate, ends, implementation=implementation)
    raised = grouped_linear(x, up, ends, implementation=implementation)
    if inner is not None:
        of_gate, of_up = _low_rank(x, inner, ends, implementation)
        gated, raised = gated + of_gate, raised + of_up
    middle = swiglu(gated, raised)
    out = grouped_linear(middle, down, ends, implementation=implementation)
    if outer is not None:
        (of_down,) = _low_rank(middle, outer, ends, implementation)
        out = out + of_down
    return out


def _low_rank(x: Tensor, adapter: LowRank, ends: Tensor, implementation: str) -> tuple[Tensor, ...]:
    """Return an adapter's contribution to the output of each of its weights, without computing B @ A."""
    a, b = adapter.a, adapter.b.flatten(1, 2)
    zeros = -a.shape[1] % (_ALIGNMENT // a.element_size())  # padding to a rank that grouped kernels support
    if zeros:
        a, b = F.pad(a, (0, 0, 0, zeros)), F.pad(b, (0, zeros))
    if adapter.dropout:
        x = F.dropout(x, adapter.dropout)
    low = adapter.scale * grouped_linear(x, a, ends, implementation=implementation)
    if adapter.others is not None:
        low = without_slots(low, adapter.others)
    return grouped_linear(low, b, ends, implementation=implementation).chunk(adapter.b.shape[1], dim=-1)


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor, *, implementation: str = AUTO) -> Tensor:
    """Return [N, O]: the rows of `x` [N, K] in group e (up to `ends[e]`) times `weight[e]`^T of [E, O, K].

    Every row belongs to a group. A group without rows gets a zero gradient.
    """
    run = GROUPED_LINEAR.choose(implementation, _variant(weight), x.device, x.dtype)
    if x.shape[0] == 0:
        return F.linear(x, weight[0])  # grouped kernels reject empty input; this gives zero gradients instead of None
    return run(x, weight, ends)


def _variant(weight: Tensor) -> str:
    fits = all(size * weight.element_size() % _ALIGNMENT == 0 for size in weight.shape[1:])
    return "aligned" if fits else "unaligned"


def _eager(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Loop over groups, with `ends` read on the host."""
    bounds = pairwise([0, *ends.tolist()])
    return torch.cat([F.linear(x[start:end], weight[group]) for group, (start, end) in enumerate(bounds)])


def _grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    if x.dtype != torch.bfloat16 and torch.compiler.is_compiling():
        from tessera.ops.uncompiled import grouped_product  # late, because its decorator imports the compiler

        return grouped_product(x, weight, ends)
    return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)


def _counted(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Replace `_grouped` in dry runs, whose tensors have no values: split rows evenly, and use the same memory."""
    parts = x.tensor_split(weight.shape[0])
    return torch.cat([F.linear(part, weight[group]) for group, part in enumerate(parts)])


GROUPED_LINEAR = DispatchedOp(
    "grouped_linear",
    (
        Implementation(
            "counted",
            _counted,
            ("aligned", "unaligned"),
            needs=("no_values",),
            dtypes=(torch.float32, torch.float16),  # dtypes without a meta implementation in torch
        ),
        Implementation(
            "grouped",
            _grouped,
            ("aligned",),
            needs=("grouped_mm",),
            dtypes=(torch.float32, torch.bfloat16, torch.float16),
        ),
        Implementation("eager", _eager, ("aligned", "unaligned")),
    ),
)
