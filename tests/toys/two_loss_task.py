"""Two losses with different counts: the next token at trained positions, and a regression at every third token."""

from __future__ import annotations

from torch import Tensor

from tessera.core.batch import Batch
from tessera.core.outputs import HIDDEN, LOGITS, Outputs, tensor
from tessera.core.task import Counts, Losses, LossTerm
from tessera.tasks.language import LanguageTask


class TwoLossTask(LanguageTask):
    reads = (LOGITS, HIDDEN)

    def __init__(self, weight: float = 0.5) -> None:
        super().__init__()
        self.weight = weight

    def counts(self, batch: Batch) -> Counts:
        return {**super().counts(batch), "codes": codes(batch).sum()}

    def losses(self, outputs: Outputs, batch: Batch) -> Losses:
        error = (tensor(outputs, HIDDEN)[:, 0].float() - batch["tokens"].float().sin()).square()
        regression = LossTerm("regression_loss", (error * codes(batch)).sum(), "codes", self.weight)
        return Losses([*super().losses(outputs, batch).terms, regression])


def codes(batch: Batch) -> Tensor:
    return batch["tokens"] % 3 == 0


TASK = TwoLossTask
