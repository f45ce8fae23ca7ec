"""Train to predict the next token, of text alone or with media: tokens that have a label are trained on."""

from __future__ import annotations

from torch import Tensor

from tessera.core.task import Counts, Losses, LossTerm, Task
from tessera.core.types import IGNORE, Batch, LanguageOutput
from tessera.ops.loss import linear_cross_entropy, take_rows
from tessera.ops.registry import AUTO

LABELS = "labels"  # the count: tokens that are trained on
LANGUAGE_LOSS = "language_loss"
ROUTER_AUX = "router_aux_loss"  # before its weight, as a mean over trained tokens


class LanguageTask(Task):
    """Sum the cross-entropy of the tokens that have a label, and the router loss of experts."""

    def __init__(self) -> None:
        self._implementation = AUTO

    def compile(self) -> None:
        self._implementation = "compiled"

    def counts(self, batch: Batch) -> Counts:
        return {LABELS: label_count(batch)}

    def losses(self, outputs: LanguageOutput, batch: Batch) -> Losses:
        weight, hidden, labels = outputs.head.weight, outputs.hidden, batch["labels"]
        # Logits are expensive; those of images and of questions are not needed.
        if "trained" in batch:
            hidden, labels = take_rows(hidden, batch["trained"]), labels.index_select(0, batch["trained"])
        # `precision.output` may have widened the hidden states; the product is taken in the head's type.
        total, _ = linear_cross_entropy(hidden.to(weight.dtype), weight, labels, implementation=self._implementation)
        terms = [LossTerm(LANGUAGE_LOSS, total, LABELS)]
        if outputs.router_aux is not None:
            terms.append(LossTerm(ROUTER_AUX, outputs.router_aux, LABELS, outputs.router_aux_weight))
        return Losses(terms)


def label_count(batch: Batch) -> int | Tensor:
    """Return how many tokens of a micro-batch have a label."""
    return batch["trained"].shape[0] if "trained" in batch else (batch["labels"] != IGNORE).sum()


TASK = LanguageTask
