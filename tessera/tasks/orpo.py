"""Train by odds ratio preference optimisation: learn the better answer as in fine-tuning, while its odds rise over
those of the worse one. There is no reference model.

    loss = mean over tokens of better answers of -log p(token)  +  beta  mean over pairs of -log s(r)
    r = log odds(better) - log odds(worse),   log odds = l - log(1 - exp l),   l: mean log-probability of a token

Both means are taken over the global batch, so any split of the batch gives the same gradient.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from tessera.config.reader import Section
from tessera.core.batch import Batch
from tessera.core.outputs import Outputs
from tessera.core.task import Counts, Losses, LossTerm
from tessera.tasks.answers import PAIRS, AnswerTask, answer_lengths, answer_log_probs, pair_metrics, whole_pairs

CHOSEN_LABELS = "chosen_labels"  # key of the number of labelled tokens in better answers


class OrpoOptions(Section):
    """Declare `train.task_options` of `OrpoTask`."""

    beta: float = Field(0.1, gt=0, le=1e6, description="weight of the odds ratio beside the language loss")


class OrpoTask(AnswerTask):
    """Learn better answers, and raise their odds over the odds of worse answers."""

    name = "orpo"
    section = OrpoOptions
    options: OrpoOptions

    def counts(self, batch: Batch) -> Counts:
        pairs = super().counts(batch)
        chosen = answer_lengths(batch).view(-1, 2)[:, 0]
        return {**pairs, CHOSEN_LABELS: chosen.where(whole_pairs(batch), 0.0).sum()}

    def losses(self, outputs: Outputs, batch: Batch) -> Losses:
        log_probs, whole, beta = answer_log_probs(outputs, batch), whole_pairs(batch), self.options.beta
        means = (log_probs / answer_lengths(batch).clamp(min=1)).view(-1, 2)
        ratio = (_log_odds(means[:, 0]) - _log_odds(means[:, 1])).where(whole, 0.0)
        language = -log_probs.view(-1, 2)[:, 0].where(whole, 0.0).sum()
        odds = -F.logsigmoid(ratio).where(whole, 0.0).sum()
        return Losses(
            [LossTerm("language_loss", language, CHOSEN_LABELS), LossTerm("odds_loss", odds, PAIRS, beta)],
            pair_metrics(beta * means, beta * (means[:, 0] - means[:, 1]), whole),
        )


def _log_odds(log_prob: Tensor) -> Tensor:
    """Return log(p / (1 - p)), clamped so that it is finite for answers without tokens and for p = 1."""
    below = log_prob.clamp(max=-torch.finfo(torch.float32).eps)
    return below - torch.log(-torch.expm1(below))


TASK = OrpoTask
