"""Train by direct preference optimisation: the better of two answers should become likelier than the worse, by more
than it already was for a reference.

    loss of a pair = -(1 - e) log s(m) - e log s(-m),   s: the logistic function, e: label_smoothing
    m = beta ((log p(better) - log p(worse)) - (the same of the reference))

Losses add up over pairs and are divided once, by the pairs of the global batch: any split of it trains alike.
"""

from __future__ import annotations

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from tessera.config.reader import Section, build
from tessera.core.batch import Batch
from tessera.core.outputs import Outputs
from tessera.core.task import Losses, LossTerm
from tessera.tasks.answers import PAIRS, ReferencedTask, answer_log_probs, pair_metrics, whole_pairs


class DpoOptions(Section):
    """Declare `train.task_options` of `DpoTask`."""

    beta: float = Field(0.1, gt=0, le=1e6)
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="the share of pairs that are taken to be the wrong way round"
    )
    reference_free: bool = False


class DpoTask(ReferencedTask):
    """Compare the log-probabilities of two answers with those of a reference."""

    name = "dpo"

    def __init__(self, beta: float = 0.1, label_smoothing: float = 0.0, reference_free: bool = False) -> None:
        given = {"beta": beta, "label_smoothing": label_smoothing, "reference_free": reference_free}
        options = build(DpoOptions, given, "train.task_options")
        self.beta = options.beta
        self.smoothing = options.label_smoothing
        self.reference_free = options.reference_free

    def losses(self, outputs: Outputs, batch: Batch) -> Losses:
        rewards = self.beta * self.compared(answer_log_probs(outputs, batch), batch).view(-1, 2)
        whole = whole_pairs(batch)
        margin = rewards[:, 0] - rewards[:, 1]
        total = smoothed_loss(margin, self.smoothing).where(whole, 0.0).sum()
        return Losses([LossTerm("dpo_loss", total, PAIRS)], pair_metrics(rewards, margin, whole))


def smoothed_loss(margin: Tensor, smoothing: float) -> Tensor:
    """Return the logistic loss of margins, of which the share `smoothing` has the wrong sign."""
    return -(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)


TASK = DpoTask
