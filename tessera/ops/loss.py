"""Output projection and cross-entropy in one, so that the logits of a long row never exist at once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.core.compiling import OPTIONS
from tessera.core.types import IGNORE
from tessera.ops.products import add_product
from tessera.ops.registry import AUTO, Implementation, Operation
from tessera.ops.rows import in_chunks
from tessera.ops.vocab import vocab_logits, vocab_part
from tessera.ops.vocab_loss import chunked_vocab_loss, scaled_gradients

DEFAULT_CHUNK = 2048  # positions; larger ones are hardly faster and hold more logits


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    chunk: int = DEFAULT_CHUNK,
    implementation: str = AUTO,
) -> tuple[Tensor, Tensor]:
    """Sum of the cross-entropy of `hidden` [T, D] times `weight` [V, D] against `labels` [T], in fp32, and how many
    positions were trained on. Those labelled IGNORE count for nothing; when all are, sum and gradients are 0.

    `weight` may be dealt out by rows over ranks that all have the same `hidden` and `labels` (see `ops.vocab`): then
    each takes the logits of its own rows, and all have the same sum and the same gradient of `hidden`.
    """
    run = LINEAR_CROSS_ENTROPY.choose(implementation, "plain", hidden.device, hidden.dtype)
    total: Tensor = run(hidden, weight, labels, chunk)
    return total, (labels != IGNORE).sum()


def _eager(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
    logits = vocab_logits(hidden, weight).float()
    return F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")


LossAndSlope = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def _chunked(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
    # Under no_grad a Function still sees requires_grad on its inputs; say here whether gradients are worth computing.
    differentiate = torch.is_grad_enabled()
    if (part := vocab_part(weight)) is not None:
        return chunked_vocab_loss(hidden, part, labels, chunk, differentiate)
    total: Tensor = _ChunkedLoss.apply(hidden, weight, labels, chunk, _loss_and_slope, differentiate)  # type: ignore[no-untyped-call]
    return total


def _compiled(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
    if vocab_part(weight) is not None or not torch.is_grad_enabled():
        return _chunked(hidden, weight, labels, chunk)  # there is no slope, or ranks have to talk in between
    # Logits are never held in fp32, so twice as many take no more memory.
    middle = _compiled_loss_and_slope()
    total: Tensor = _ChunkedLoss.apply(hidden, weight, labels, 2 * chunk, middle, True)  # type: ignore[no-untyped-call]
    return total


def _loss_and_slope(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Of each position, [N, 1] in fp32, and its gradient by the logits, in their type."""
    kind, logits = logits.dtype, logits.log_softmax(-1, dtype=torch.float32)
    found = logits.gather(1, targets)
    return -found, logits.exp_().scatter_add_(1, targets, logits.new_full(targets.shape, -1.0)).to(kind)


def _fusible_loss_and_slope(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The same in steps that a compiler joins: logits are read twice and the slope is written once, nothing else."""
    wide = logits.float()
    whole = wide.logsumexp(-1, keepdim=True)
    loss = whole - wide.gather(1, targets)
    hit = torch.arange(logits.shape[1], device=logits.device) == targets
    return loss, ((wide - whole).exp() - hit.to(torch.float32)).to(logits.dtype)


@functools.cache  # made once, and not on import: the compiler itself takes seconds to import
def _compiled_loss_and_slope() -> LossAndSlope:
    made: LossAndSlope = torch.compile(_fusible_loss_and_slope, options=OPTIONS)
    return made


class _ChunkedLoss(torch.autograd.Function):
    """Takes the gradients while the logits of a chunk are at hand, and only scales them in the backward pass.

    That costs three matrix products where recomputing the logits would cost four. What is kept has the shape of
    `hidden` and, unless it is frozen, of `weight`; the backward pass starts here, so it is not kept for long.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        chunk: int,
        middle: LossAndSlope,
        differentiate: bool,
    ) -> Tensor:
        for_hidden = differentiate and ctx.needs_input_grad[0]
        for_weight = differentiate and ctx.needs_input_grad[1]
        hidden_grad = torch.empty_like(hidden) if for_hidden else None
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if for_weight else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for rows in in_chunks(hidden.shape[0], chunk):
            trained = (labels[rows] != IGNORE).unsqueeze(1)
            targets = labels[rows].clamp(min=0).unsqueeze(1)
            logits = F.linear(hidden[rows], weight)
            if not (for_hidden or for_weight):
                total -= logits.log_softmax(-1, dtype=torch.float32).gather(1, targets).where(trained, 0.0).sum()
                continue
            loss, slope = middle(logits, targets)
            total += loss.where(trained, 0.0).sum()
            # Untrained positions are masked here, on the narrow side, and not in the slope, which is as wide as the
            # vocabulary.
            if hidden_grad is not None:
                torch.mul(slope @ weight, trained, out=hidden_grad[rows])
            if weight_grad is not None:
                add_product(weight_grad, slope.t(), hidden[rows] * trained)
        ctx.save_for_backward(hidden_grad, weight_grad)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        return (*scaled_gradients(ctx, grads[0]), None, None, None, None)


# Compiling is for those who ask for it: the first call takes seconds, and a compiler has to be there.
LINEAR_CROSS_ENTROPY = Operation(
    "linear_cross_entropy",
    (Implementation("chunked", _chunked), Implementation("compiled", _compiled), Implementation("eager", _eager)),
)
