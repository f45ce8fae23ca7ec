"""Cross-entropy over a table of tokens that is dealt out over ranks. The logits of a row are never brought together:
of each position, ranks tell each other three numbers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tessera.core.types import IGNORE
from tessera.ops.products import add_product
from tessera.ops.rows import in_chunks
from tessera.ops.vocab import VocabPart


def chunked_vocab_loss(hidden: Tensor, part: VocabPart, labels: Tensor, chunk: int, differentiate: bool) -> Tensor:
    """Sum over all positions, in fp32. `hidden` and `labels` are the same on all ranks, and so is the sum."""
    rows = part.rows
    total: Tensor = _ChunkedVocabLoss.apply(hidden, rows, labels, part, chunk, differentiate)  # type: ignore[no-untyped-call]
    return total


class _ChunkedVocabLoss(torch.autograd.Function):
    """As the loss over a whole table, chunk by chunk with the gradients taken at once, and one exchange per chunk.

    Each rank's gradient of `hidden` is what its own rows of the table add; the sum is taken once, over all positions.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, rows: Tensor, labels: Tensor, part: VocabPart, chunk: int, differentiate: bool
    ) -> Tensor:
        for_hidden = differentiate and ctx.needs_input_grad[0]
        for_rows = differentiate and ctx.needs_input_grad[1]
        hidden_grad = torch.empty_like(hidden) if for_hidden else None
        rows_grad = torch.zeros_like(rows, dtype=torch.float32) if for_rows else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for here in in_chunks(hidden.shape[0], chunk):
            trained = (labels[here] != IGNORE).unsqueeze(1)
            place, own = (x.unsqueeze(1) for x in part.find(labels[here]))
            logits = F.linear(hidden[here], rows).float()
            highest = logits.amax(1, keepdim=True)
            target = logits.gather(1, place).where(own, 0.0)
            powers = logits.sub_(highest).exp_()
            loss, share = join_vocab(highest, powers.sum(1, keepdim=True), target, part)
            total += loss.where(trained, 0.0).sum()
            if not (for_hidden or for_rows):
                continue
            slope = powers.mul_(share).scatter_add_(1, place, -own.to(powers.dtype)).to(hidden.dtype)
            # Untrained positions are masked on the narrow side, as they are over a whole table.
            if hidden_grad is not None:
                torch.mul(slope @ rows, trained, out=hidden_grad[here])
            if rows_grad is not None:
                add_product(rows_grad, slope.t(), hidden[here] * trained)
        if hidden_grad is not None:
            dist.all_reduce(hidden_grad, group=part.group)
        ctx.save_for_backward(hidden_grad, rows_grad)
        ctx.weight_dtype = rows.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        return (*scaled_gradients(ctx, grads[0]), None, None, None, None)


def join_vocab(highest: Tensor, sums: Tensor, target: Tensor, part: VocabPart) -> tuple[Tensor, Tensor]:
    """The loss of each position, and what this rank's powers (of e, over its own highest logit) must be multiplied by
    to become probabilities. All are [N, 1]; `target` is 0 on the ranks that do not have it."""
    told = torch.stack([highest, sums, target])
    heard = [torch.empty_like(told) for _ in range(part.ranks)]
    dist.all_gather(heard, told, group=part.group)
    peaks, parts, targets = torch.stack(heard, 1)
    peak = peaks.amax(0)
    whole = (parts * (peaks - peak).exp()).sum(0)
    return whole.log() + peak - targets.sum(0), (highest - peak).exp() / whole


def scaled_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The gradients that a forward pass has saved. Scaled in fp32: rounding the one factor to bf16 would lengthen or
    shorten every gradient of the model alike."""
    hidden_grad, weight_grad = ctx.saved_tensors
    return (
        None if hidden_grad is None else (hidden_grad.float() * grad).to(hidden_grad.dtype),
        # Into its last type at once: this one is as large as the table.
        None
        if weight_grad is None
        else torch.mul(weight_grad, grad, out=torch.empty_like(weight_grad, dtype=ctx.weight_dtype)),
    )
