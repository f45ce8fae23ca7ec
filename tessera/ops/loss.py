"""Output projection and loss in one, chunk by chunk, so that the logits of a long sequence never exist at once.

`linear_cross_entropy` sums over tokens; `token_log_probs` returns one value per token, for other losses. The vocabulary
may be sharded over ranks: they exchange three values per token instead of logits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tessera.core.batch import IGNORE
from tessera.ops.linear import accumulate_matmul, tensor_core_padding
from tessera.ops.registry import AUTO, DispatchedOp, Implementation
from tessera.ops.vocab import VocabPart, vocab_logits, vocab_part
from tessera.runtime.modules import COMPILE_OPTIONS

DEFAULT_CHUNK = 2048  # positions per chunk; larger chunks are hardly faster and need more memory


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    chunk: int = DEFAULT_CHUNK,
    implementation: str = AUTO,
) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropy of logits `hidden` [T, D] @ `weight` [V, D]^T, in fp32, and the number
    of trained positions.

    Positions with label IGNORE are skipped; if all labels are IGNORE, sum and gradients are 0. `weight` may be sharded
    by rows over ranks with equal `hidden` and `labels` (see `ops.vocab`): each rank computes the logits of its rows,
    and all get the same sum and the same gradient of `hidden`.
    """
    run = LINEAR_CROSS_ENTROPY.choose(implementation, "plain", hidden.device, hidden.dtype)
    total: Tensor = run(hidden, weight, labels, chunk)
    return total, (labels != IGNORE).sum()


def _eager(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
    logits = vocab_logits(hidden, weight).float()
    return F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")


# Arguments: logits of this rank, labels, its part of a sharded vocabulary, whether a gradient is needed. Returns the
# loss of each position, [N, 1] in fp32, and its gradient with respect to these logits.
LossAndGrad = Callable[[Tensor, Tensor, "VocabPart | None", bool], "tuple[Tensor, Tensor | None]"]


def _chunked(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
    part = vocab_part(weight)
    rows = weight if part is None else part.rows
    # Inside an autograd Function `needs_input_grad` is true even under no_grad, so the grad mode is passed in.
    differentiate = torch.is_grad_enabled()
    return _ChunkedLoss.apply(hidden, rows, labels, part, chunk, _loss_and_grad, differentiate)  # type: ignore[no-untyped-call]


def _compiled(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
    if vocab_part(weight) is not None or not torch.is_grad_enabled():
        # without gradients, or with communication between ranks, compiling does not help
        return _chunked(hidden, weight, labels, chunk)
    # The compiled loss stores no fp32 logits, so chunks of twice the size need no more memory.
    loss_and_grad = _compiled_loss_and_grad()
    return _ChunkedLoss.apply(hidden, weight, labels, None, 2 * chunk, loss_and_grad, True)  # type: ignore[no-untyped-call]


def _loss_and_grad(
    logits: Tensor, labels: Tensor, part: VocabPart | None, with_grad: bool
) -> tuple[Tensor, Tensor | None]:
    if part is None:
        targets = labels.clamp(min=0).unsqueeze(1)
        logits = logits.log_softmax(-1, dtype=torch.float32)
        loss = -logits.gather(1, targets)
        if not with_grad:
            return loss, None
        return loss, logits.exp_().scatter_add_(1, targets, logits.new_full(targets.shape, -1.0))
    target_row, local = (x.unsqueeze(1) for x in part.find(labels))
    logits = logits.float()
    highest = logits.amax(1, keepdim=True)
    target = logits.gather(1, target_row).where(local, 0.0)
    powers = logits.sub_(highest).exp_()
    loss, share = join_vocab(highest, powers.sum(1, keepdim=True), target, part)
    return loss, powers.mul_(share).scatter_add_(1, target_row, -local.to(powers.dtype)) if with_grad else None


def _fusible_loss_and_grad(
    logits: Tensor, labels: Tensor, part: VocabPart | None, with_grad: bool
) -> tuple[Tensor, Tensor]:
    """Return the same as `_loss_and_grad` for an unsharded vocabulary, in operations that the compiler fuses.

    Logits are read only twice, and their gradient has their dtype.
    """
    targets = labels.clamp(min=0).unsqueeze(1)
    wide = logits.float()
    lse = wide.logsumexp(-1, keepdim=True)
    loss = lse - wide.gather(1, targets)
    hit = torch.arange(logits.shape[1], device=logits.device) == targets
    return loss, ((wide - lse).exp() - hit.to(torch.float32)).to(logits.dtype)


@functools.cache  # compiled on first use, because importing the compiler takes seconds
def _compiled_loss_and_grad() -> LossAndGrad:
    return torch.compile(_fusible_loss_and_grad, options=COMPILE_OPTIONS)


class _ChunkedLoss(torch.autograd.Function):
    """Compute gradients in the forward pass, while the logits of a chunk exist, and scale them in the backward pass.

    This takes three matrix products; recomputing logits would take four. The gradients of `hidden` and (unless frozen)
    of `rows` are kept, but not for long, because the backward pass starts here. With a sharded vocabulary each rank's
    gradient of `hidden` covers its own rows; one all-reduce sums them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        rows: Tensor,
        labels: Tensor,
        part: VocabPart | None,
        chunk: int,
        loss_and_grad: LossAndGrad,
        differentiate: bool,
    ) -> Tensor:
        for_hidden = differentiate and ctx.needs_input_grad[0]
        for_rows = differentiate and ctx.needs_input_grad[1]
        hidden_grad = torch.empty_like(hidden) if for_hidden else None
        vocab, ctx.rows_dtype = rows.shape[0], rows.dtype
        if zeros := tensor_core_padding(hidden, vocab):  # products with unaligned logits are slow
            rows = F.pad(rows, (0, 0, 0, zeros))
        rows_grad = torch.zeros_like(rows, dtype=torch.float32) if for_rows else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for at in in_chunks(hidden.shape[0], chunk):
            trained = (labels[at] != IGNORE).unsqueeze(1)
            logits = F.linear(hidden[at], rows)
            loss, grad = loss_and_grad(logits[:, :vocab], labels[at], part, for_hidden or for_rows)
            total += loss.where(trained, 0.0).sum()
            if grad is None:
                continue
            if rows.shape[0] > vocab or grad.dtype != logits.dtype:
                logits[:, :vocab] = grad
                grad = logits  # zero in padded columns: logits of rows of zeros are zeros
            del logits
            # Untrained positions are masked in tensors of width D, which is cheaper than in logits of width V.
            if hidden_grad is not None:
                torch.mul(grad @ rows, trained, out=hidden_grad[at])
            if rows_grad is not None:
                accumulate_matmul(rows_grad, grad.t(), hidden[at] * trained)
        if hidden_grad is not None and part is not None:
            dist.all_reduce(hidden_grad, group=part.group)
        ctx.save_for_backward(hidden_grad, None if rows_grad is None else rows_grad[:vocab])
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Scale gradients in fp32: rounding the factor to bf16 would change every gradient of the model."""
        hidden_grad, rows_grad = ctx.saved_tensors
        if hidden_grad is not None:
            hidden_grad = (hidden_grad.float() * grads[0]).to(hidden_grad.dtype)
        if rows_grad is not None:  # cast in the same step: this gradient is as large as the head
            rows_grad = torch.mul(rows_grad, grads[0], out=torch.empty_like(rows_grad, dtype=ctx.rows_dtype))
        return hidden_grad, rows_grad, None, None, None, None, None


# `compiled` only on request: its first call takes seconds and needs a C compiler.
LINEAR_CROSS_ENTROPY = DispatchedOp(
    "linear_cross_entropy",
    (Implementation("chunked", _chunked), Implementation("compiled", _compiled), Implementation("eager", _eager)),
)


def join_vocab(highest: Tensor, sums: Tensor, target: Tensor, part: VocabPart) -> tuple[Tensor, Tensor]:
    """Return the loss of each position, and the factor that turns this rank's exponentials into probabilities.

    `highest`: largest local logit. `sums`: sum of exponentials relative to it. `target`: logit of the label, 0 on ranks
    without it. All are [N, 1].
    """
    local = torch.stack([highest, sums, target])
    gathered = [torch.empty_like(local) for _ in range(part.ranks)]
    dist.all_gather(gathered, local, group=part.group)
    peaks, parts, targets = torch.stack(gathered, 1)
    peak = peaks.amax(0)
    whole = (parts * (peaks - peak).exp()).sum(0)
    return whole.log() + peak - targets.sum(0), (highest - peak).exp() / whole


def token_log_probs(hidden: Tensor, weight: Tensor, labels: Tensor, *, chunk: int = DEFAULT_CHUNK) -> Tensor:
    """Return log-probabilities [T] in fp32 of `labels` [T] under logits `hidden` [T, D] @ `weight` [V, D]^T.

    They are 0 for label IGNORE. `weight` may be sharded by rows over ranks (see `ops.vocab`).
    """
    part = vocab_part(weight)
    rows = weight if part is None else part.rows
    differentiate = torch.is_grad_enabled()
    return _TokenLogProbs.apply(hidden, rows, labels, part, chunk, differentiate)  # type: ignore[no-untyped-call]


class _TokenLogProbs(torch.autograd.Function):
    """Compute the gradient of `hidden` in the forward pass and scale it in the backward pass.

    The gradient of a position depends only on its own log-probability. The gradient of `rows` depends on the incoming
    gradients of all positions, so the backward pass recomputes logits if `rows` is trained.
    """

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
        log_probs = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        hidden_grad = torch.empty_like(hidden) if for_hidden else None
        for at in in_chunks(hidden.shape[0], chunk):
            trained = (labels[at] != IGNORE).unsqueeze(1)
            loss, loss_grad = _loss_and_grad(F.linear(hidden[at], rows), labels[at], part, for_hidden)
            log_probs[at] = -loss.where(trained, 0.0).squeeze(1)
            if hidden_grad is not None and loss_grad is not None:
                torch.mul(loss_grad.to(hidden.dtype) @ rows, trained, out=hidden_grad[at])
        if hidden_grad is not None and part is not None:
            dist.all_reduce(hidden_grad, group=part.group)
        ctx.part, ctx.chunk = part, chunk
        ctx.save_for_backward(hidden_grad, hidden, rows, labels)
        return log_probs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, hidden, rows, labels = ctx.saved_tensors
        grad_of_loss = -grads[0].unsqueeze(1)
        scaled_hidden_grad = None if hidden_grad is None else (hidden_grad.float() * grad_of_loss).to(hidden.dtype)
        rows_grad = None
        if ctx.needs_input_grad[1]:
            rows_grad = torch.zeros_like(rows, dtype=torch.float32)
            for at in in_chunks(hidden.shape[0], ctx.chunk):
                _, loss_grad = _loss_and_grad(F.linear(hidden[at], rows), labels[at], ctx.part, True)
                assert loss_grad is not None
                scale = grad_of_loss[at] * (labels[at] != IGNORE).unsqueeze(1)
                rows_grad += (loss_grad.t() @ (hidden[at].float() * scale)).float()
            rows_grad = rows_grad.to(rows.dtype)
        return scaled_hidden_grad, rows_grad, None, None, None, None


def in_chunks(rows: int, most: int) -> Iterator[slice]:
    """Yield slices that cover `rows` in as few chunks of at most `most` as possible, of nearly equal size."""
    size = -(-rows // max(1, -(-rows // most)))
    for start in range(0, rows, max(1, size)):
        yield slice(start, start + size)
