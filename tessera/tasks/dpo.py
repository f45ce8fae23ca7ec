"""Direct preference optimisation: the better of two answers should become likelier than the worse, by more than it
already was for a reference.

The reference is the model without its adapters, so it costs no memory; each micro-batch runs through it first. A whole
second model is not kept: without adapters, `reference_free` compares with nothing.

    loss of a pair = -(1 - e) log s(m) - e log s(-m),   s: the logistic function, e: label_smoothing
    m = beta ((log p(better) - log p(worse)) - (the same of the reference))

Losses add up over pairs and are divided once, by the pairs of the global batch: any split of it trains alike.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from tessera.core.config import Section, build
from tessera.core.errors import TesseraError
from tessera.core.types import IGNORE, Batch, LanguageOutput, LossOut
from tessera.nn.lora import adapters_of, without_adapters
from tessera.nn.moe import Balance
from tessera.ops.rows import take_rows
from tessera.ops.token_loss import token_log_probs

REFERENCE = "reference_log_probs"


class AdaptersOff:
    """A `Reference`: the model as it was before it was adapted."""

    def of(self, module: nn.Module) -> AbstractContextManager[None]:
        return without_adapters(module)

    def seen(self, outputs: LanguageOutput, batch: Batch) -> dict[str, Tensor]:
        return {REFERENCE: answer_log_probs(outputs, batch)}


class DpoOptions(Section):
    """`train.task_options` of this task."""

    beta: float = Field(0.1, gt=0, le=1e6)
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="the share of pairs that are taken to be the wrong way round"
    )
    reference_free: bool = False


class DpoTask:
    def __init__(self, beta: float = 0.1, label_smoothing: float = 0.0, reference_free: bool = False) -> None:
        given = {"beta": beta, "label_smoothing": label_smoothing, "reference_free": reference_free}
        options = build(DpoOptions, given, "train.task_options")
        self.beta = options.beta
        self.smoothing = options.label_smoothing
        self.reference = None if options.reference_free else AdaptersOff()

    def check(self, module: nn.Module) -> None:
        """Of the whole model, before it is dealt out."""
        if any(part.coefficient > 0 for part in module.modules() if isinstance(part, Balance)):
            raise TesseraError(
                "dpo has no loss that keeps experts evenly used",
                where="train.task=dpo",
                fix="set output_router_logits: false for the model's experts",
            )
        if self.reference is not None and not adapters_of(module):
            raise TesseraError(
                "dpo compares with the model as it was, and a whole second model is not kept beside the trained one",
                where="train.task=dpo",
                fix="train adapters (model.lora: {}): without them the model is its own reference. Or compare with "
                "nothing: train.task_options.reference_free=true",
            )

    def inputs(self, batch: Batch) -> Batch:
        if "pair" not in batch:
            raise TesseraError(
                "the batch has no pairs of answers", where="data.kind", fix="data.kind=preference reads them"
            )
        if "token_index" in batch:
            raise TesseraError(
                "dpo needs whole answers on a rank, and with parallel.cp ranks share them",
                where="parallel.cp",
                allowed=[1],
            )
        return replace(batch, tensors=dict(batch.tensors))  # what the reference saw joins a copy

    def loss(self, outputs: LanguageOutput, batch: Batch) -> LossOut:
        found = answer_log_probs(outputs, batch).view(-1, 2)
        before = torch.zeros_like(found) if self.reference is None else batch[REFERENCE].view(-1, 2)
        # A hole where a sample could not be read has no labels: such a pair counts for nothing.
        counts = (_summed((batch["labels"] != IGNORE).float(), batch["pair"], batch).view(-1, 2) > 0).all(1)
        rewards = self.beta * (found - before)
        margin = rewards[:, 0] - rewards[:, 1]
        losses = -(1 - self.smoothing) * F.logsigmoid(margin) - self.smoothing * F.logsigmoid(-margin)
        with torch.no_grad():
            told = {
                "margin": margin,
                "accuracy": (margin > 0).float(),
                "reward_chosen": rewards[:, 0],
                "reward_rejected": rewards[:, 1],
            }
            metrics = {name: value.where(counts, 0.0).sum() for name, value in told.items()}
        return LossOut(losses.where(counts, 0.0).sum(), counts.sum(), metrics)


def answer_log_probs(outputs: LanguageOutput, batch: Batch) -> Tensor:
    """Of the answers of every pair, better and worse in turn: [2 x pairs], in fp32."""
    weight, hidden, labels, pair = outputs.head.weight, outputs.hidden, batch["labels"], batch["pair"]
    if "trained" in batch:  # what they answer is the longer part, and nobody asks for its logits
        hidden = take_rows(hidden, batch["trained"])
        labels, pair = (x.index_select(0, batch["trained"]) for x in (labels, pair))
    return _summed(token_log_probs(hidden.to(weight.dtype), weight, labels), pair, batch)


def _summed(values: Tensor, pair: Tensor, batch: Batch) -> Tensor:
    """Over the tokens of each answer; what belongs to none goes to a place of its own and is left there."""
    places = 2 * batch["pair_ids"].shape[0]
    where = pair.where(pair >= 0, places)
    return values.new_zeros(places + 1).index_add(0, where, values)[:places]


TASK = DpoTask
