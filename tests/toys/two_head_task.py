"""Two heads, two losses with counts of their own, and hidden states of a layer: the next token by the main head, a code
at every third token by the second head, and a regression of what the last layer gives, over all tokens."""

from __future__ import annotations

from torch import Tensor

from tessera.core.batch import IGNORE, Batch
from tessera.core.outputs import LOGITS, Outputs, hidden_of, projection, tensor
from tessera.core.task import Counts, Losses, LossTerm
from tessera.ops.loss import linear_cross_entropy
from tessera.tasks.language import LanguageTask
from tests.toys.two_encoders import CODES

LAYER = hidden_of("text.layers.1")


class TwoHeadTask(LanguageTask):
    reads = (LOGITS, CODES, LAYER)

    def counts(self, batch: Batch) -> Counts:
        coded = (codes(batch) != IGNORE).sum()
        return {**super().counts(batch), "codes": coded, "tokens": batch["tokens"].shape[0]}

    def losses(self, outputs: Outputs, batch: Batch) -> Losses:
        hidden, head = projection(outputs, CODES)
        total, _ = linear_cross_entropy(hidden, head.weight, codes(batch))
        error = (tensor(outputs, LAYER)[:, 0].float() - batch["tokens"].float().sin()).square().sum()
        terms = [LossTerm("code_loss", total, "codes", 0.5), LossTerm("layer_loss", error, "tokens", 0.1)]
        return Losses([*super().losses(outputs, batch).terms, *terms])


def codes(batch: Batch) -> Tensor:
    tokens = batch["tokens"]
    return (tokens * 7 + 3).remainder(12).where(tokens % 3 == 0, IGNORE)


TASK = TwoHeadTask
