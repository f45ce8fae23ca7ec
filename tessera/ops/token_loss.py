"""Log-probabilities of labels, position by position, without the logits of a whole row: for losses that are no plain
sum over tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tessera.core.types import IGNORE
from tessera.ops.loss import DEFAULT_CHUNK
from tessera.ops.rows import in_chunks
from tessera.ops.vocab import VocabPart, vocab_part
from tessera.ops.vocab_loss import join_vocab


def token_log_probs(hidden: Tensor, weight: Tensor, labels: Tensor, *, chunk: int = DEFAULT_CHUNK) -> Tensor:
    """Of `labels` [T] under `hidden` [T, D] times `weight` [V, D]: [T] in fp32, 0 where the label is IGNORE.

    `weight` may be dealt out by rows over ranks that all have the same `hidden` and `labels` (see `ops.vocab`).
    """
    part = vocab_part(weight)
    rows = weight if part is None else part.rows
    differentiate = torch.is_grad_enabled()
    found: Tensor = _TokenLogProbs.apply(hidden, rows, labels, part, chunk, differentiate)  # type: ignore[no-untyped-call]
    return found


class _TokenLogProbs(torch.autograd.Function):
    """The gradient of `hidden` at a position is that of its own log-probability, so it is taken at once and only scaled
    later. That of the table needs to know the scales first: its logits are computed a second time, if it is trained."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        rows: Tensor,
        labels: Tensor,
        part: VocabPart | None,
        chunk: int,
        differentiate: bool,
    ) -> Tensor:
        for_hidden = differentiate and ctx.needs_input_grad[0]
        found = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        slope_of_hidden = torch.empty_like(hidden) if for_hidden else None
        for here in in_chunks(hidden.shape[0], chunk):
            trained = (labels[here] != IGNORE).unsqueeze(1)
            log_probs, slope = _chunk(hidden[here], rows, labels[here], part, for_hidden)
            found[here] = log_probs.where(trained, 0.0).squeeze(1)
            if slope_of_hidden is not None and slope is not None:
                torch.mul(slope.to(hidden.dtype) @ rows, trained, out=slope_of_hidden[here])
        if slope_of_hidden is not None and part is not None:
            dist.all_reduce(slope_of_hidden, group=part.group)
        ctx.part, ctx.chunk = part, chunk
        ctx.save_for_backward(slope_of_hidden, hidden, rows, labels)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        slope_of_hidden, hidden, rows, labels = ctx.saved_tensors
        grad = grads[0].unsqueeze(1)
        of_hidden = None if slope_of_hidden is None else (slope_of_hidden.float() * grad).to(hidden.dtype)
        of_rows = None
        if ctx.needs_input_grad[1]:
            of_rows = torch.zeros_like(rows, dtype=torch.float32)
            for here in in_chunks(hidden.shape[0], ctx.chunk):
                _, slope = _chunk(hidden[here], rows, labels[here], ctx.part, True)
                assert slope is not None
                scale = grad[here] * (labels[here] != IGNORE).unsqueeze(1)
                of_rows += (slope.t() @ (hidden[here].float() * scale)).float()
            of_rows = of_rows.to(rows.dtype)
        return of_hidden, of_rows, None, None, None, None


def _chunk(
    hidden: Tensor, rows: Tensor, labels: Tensor, part: VocabPart | None, slope: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities [N, 1] of the labels, and their gradient [N, rows] by the logits of this rank's rows."""
    if part is None:
        targets = labels.clamp(min=0).unsqueeze(1)
        logits = F.linear(hidden, rows).log_softmax(-1, dtype=torch.float32)
        found = logits.gather(1, targets)
        if not slope:
            return found, None
        return found, logits.exp_().neg_().scatter_add_(1, targets, logits.new_ones(targets.shape))
    place, own = (x.unsqueeze(1) for x in part.find(labels))
    logits = F.linear(hidden, rows).float()
    highest = logits.amax(1, keepdim=True)
    target = logits.gather(1, place).where(own, 0.0)
    powers = logits.sub_(highest).exp_()
    loss, share = join_vocab(highest, powers.sum(1, keepdim=True), target, part)
    if not slope:
        return -loss, None
    return -loss, powers.mul_(share).neg_().scatter_add_(1, place, own.to(powers.dtype))
