"""Train by SimPO: the mean log-probability of a token in the better answer should be higher than in the worse one, by
a margin. There is no reference model.

    loss of a pair = -(1 - e) log s(m) - e log s(-m),   s: the logistic function, e: label_smoothing
    m = beta (log p(better) / |better| - log p(worse) / |worse|) - gamma

`accuracy` counts pairs whose better answer has the higher mean, whatever the margin; `margin` is m + gamma.
"""

from __future__ import annotations

from pydantic import Field

from tessera.config.reader import Section
from tessera.core.batch import Batch
from tessera.core.outputs import Outputs
from tessera.core.task import Losses
from tessera.tasks.answers import AnswerTask, answer_lengths, answer_log_probs, logistic_losses


class SimpoOptions(Section):
    """Declare `train.task_options` of `SimpoTask`."""

    beta: float = Field(2.0, gt=0, le=1e6)
    gamma: float = Field(1.0, ge=0, le=1e6, description="the least margin between both answers, after `beta`")
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="the share of pairs that are taken to be the wrong way round"
    )


class SimpoTask(AnswerTask):
    """Compare the mean log-probabilities of two answers."""

    name = "simpo"
    section = SimpoOptions
    options: SimpoOptions

    def losses(self, outputs: Outputs, batch: Batch) -> Losses:
        options = self.options
        means = answer_log_probs(outputs, batch) / answer_lengths(batch).clamp(min=1)
        rewards = options.beta * means
        return logistic_losses("simpo_loss", rewards, batch, gamma=options.gamma, smoothing=options.label_smoothing)


TASK = SimpoTask
