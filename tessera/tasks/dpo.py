"""Train by direct preference optimisation (DPO): raise the probability of the better of two answers over that of the
worse, compared with a reference (without one if `reference_free`).

    loss of a pair = -(1 - e) log s(m) - e log s(-m),   s: the logistic function, e: label_smoothing
    m = beta ((log p(better) - log p(worse)) - (same difference of the reference))

Losses are summed over pairs and divided once, by the number of pairs in the global batch. Any split of the batch gives
the same gradient.
"""

from __future__ import annotations

from pydantic import Field

from tessera.config.reader import Section
from tessera.core.batch import Batch
from tessera.core.outputs import Outputs
from tessera.core.task import Losses
from tessera.tasks.answers import ReferencedTask, answer_log_probs, logistic_losses


class DpoOptions(Section):
    """Declare `train.task_options` of `DpoTask`."""

    beta: float = Field(0.1, gt=0, le=1e6)
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="the share of pairs that are taken to be the wrong way round"
    )
    reference_free: bool = False


class DpoTask(ReferencedTask):
    """Compare the log-probabilities of two answers with their log-probabilities by a reference model."""

    name = "dpo"
    section = DpoOptions
    options: DpoOptions

    @property
    def reference_free(self) -> bool:
        return self.options.reference_free

    def losses(self, outputs: Outputs, batch: Batch) -> Losses:
        rewards = self.options.beta * self.compared(answer_log_probs(outputs, batch), batch)
        return logistic_losses("dpo_loss", rewards, batch, smoothing=self.options.label_smoothing)


TASK = DpoTask
