"""Train by SimPO: the mean log-probability of a token in the better answer should be higher than in the worse one, by
a margin. There is no reference model.

    loss of a pair = -(1 - e) log s(m) - e log s(-m),   s: the logistic function, e: label_smoothing
    m = beta (log p(better) / |better| - log p(worse) / |worse|) - gamma

`accuracy` counts pairs whose better answer has the higher mean, whatever the margin; `margin` is m + gamma.
"""

from __future__ import annotations

from pydantic import Field

from tessera.config.reader import Section, build
from tessera.core.batch import Batch
from tessera.core.outputs import Outputs
from tessera.core.task import Losses, LossTerm
from tessera.tasks.answers import PAIRS, AnswerTask, answer_lengths, answer_log_probs, pair_metrics, whole_pairs
from tessera.tasks.dpo import smoothed_loss


class SimpoOptions(Section):
    """Declare `train.task_options` of `SimpoTask`."""

    beta: float = Field(2.0, gt=0, le=1e6)
    gamma: float = Field(1.0, ge=0, le=1e6, description="the margin that is asked for, after `beta`")
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="the share of pairs that are taken to be the wrong way round"
    )


class SimpoTask(AnswerTask):
    """Compare the mean log-probabilities of two answers."""

    name = "simpo"

    def __init__(self, beta: float = 2.0, gamma: float = 1.0, label_smoothing: float = 0.0) -> None:
        given = {"beta": beta, "gamma": gamma, "label_smoothing": label_smoothing}
        self.options = build(SimpoOptions, given, "train.task_options")

    def losses(self, outputs: Outputs, batch: Batch) -> Losses:
        means = answer_log_probs(outputs, batch) / answer_lengths(batch).clamp(min=1)
        rewards, whole = self.options.beta * means.view(-1, 2), whole_pairs(batch)
        margin = rewards[:, 0] - rewards[:, 1]
        losses = smoothed_loss(margin - self.options.gamma, self.options.label_smoothing)
        return Losses(
            [LossTerm("simpo_loss", losses.where(whole, 0.0).sum(), PAIRS)], pair_metrics(rewards, margin, whole)
        )


TASK = SimpoTask
