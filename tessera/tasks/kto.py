"""Train by Kahneman-Tversky optimisation (KTO): on single answers that are labelled good or bad, without pairs.

    loss of a good answer = w_good (1 - s(beta (r - z)))      r = log p(answer) - (the same of the reference)
    loss of a bad answer  = w_bad (1 - s(beta (z - r)))       s: the logistic function

z estimates how far the model is from the reference: the mean of r over mismatched answers, at least 0 and without a
gradient. Mismatched answers are the answers of the same packed row, each moved to the next question. A row is in one
micro-batch under every layout, so any split of a global batch gives the same gradient. A row with one sample has no
mismatched answer, and z is 0. Losses are divided once, by the number of samples in the global batch.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from tessera.config.reader import Section
from tessera.core.batch import Batch
from tessera.core.outputs import Outputs
from tessera.core.task import Counts, Losses, LossTerm, Metric
from tessera.errors import TesseraError
from tessera.tasks.answers import ReferencedTask, answer_lengths, answer_log_probs

SAMPLES, GOOD, BAD = "samples", "good", "bad"  # keys of the numbers of samples, good answers and bad answers


class KtoOptions(Section):
    """Declare `train.task_options` of `KtoTask`."""

    beta: float = Field(0.1, gt=0, le=1e6)
    desirable_weight: float = Field(1.0, ge=0, le=1e6, description="weight of the losses of good answers")
    undesirable_weight: float = Field(
        1.0,
        ge=0,
        le=1e6,
        description="weight of the losses of bad answers; weight x number should differ by a factor up to 4/3",
    )


class KtoTask(ReferencedTask):
    """Raise the likelihood of good answers and lower that of bad ones, compared with a reference."""

    name, kind = "kto", "unpaired_preference"

    section = KtoOptions
    options: KtoOptions

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if not (self.options.desirable_weight or self.options.undesirable_weight):
            raise TesseraError(
                "both weights are 0, so the loss is always 0",
                where="train.task_options.desirable_weight",
                code="task.zero-weights",
            )

    def check_batch(self, batch: Batch) -> None:
        if "desirable" not in batch:
            raise TesseraError(
                "kto needs answers that are labelled good or bad, and the batch has none",
                where="data.kind",
                fix=f"data.kind={self.kind} reads them; pairs of answers are for dpo, orpo, simpo and reward",
                code="task.no-answer-labels",
            )

    def counts(self, batch: Batch) -> Counts:
        self.check_batch(batch)
        whole, good = _read_samples(batch), batch["desirable"]
        return {SAMPLES: whole.sum(), GOOD: (whole & good).sum(), BAD: (whole & ~good).sum()}

    def losses(self, outputs: Outputs, batch: Batch) -> Losses:
        options, whole, good = self.options, _read_samples(batch), batch["desirable"]
        ratios = self.compared(answer_log_probs(outputs, batch), batch).view(-1, 2)
        moved = _moved(ratios[:, 1].detach(), batch)
        gain = options.beta * (ratios[:, 0] - moved)
        weight = torch.where(good, options.desirable_weight, options.undesirable_weight)
        losses = weight * torch.sigmoid(torch.where(good, -gain, gain))
        with torch.no_grad():
            rewards = options.beta * ratios[:, 0]
            metrics = {
                "reward_good": Metric(rewards.where(whole & good, 0.0).sum(), GOOD),
                "reward_bad": Metric(rewards.where(whole & ~good, 0.0).sum(), BAD),
                "kl": Metric(moved.where(whole, 0.0).sum(), SAMPLES),
            }
        return Losses([LossTerm("kto_loss", losses.where(whole, 0.0).sum(), SAMPLES)], metrics)


def _read_samples(batch: Batch) -> Tensor:
    """Return a mask of the samples with labels. Masked tokens, which replace an unreadable sample, have no labels."""
    return answer_lengths(batch).view(-1, 2)[:, 0] > 0


def _moved(ratios: Tensor, batch: Batch) -> Tensor:
    """Return the reference point z of each sample: the mean of `ratios` of its row's mismatched answers, at least 0."""
    row = batch["pair_row"]
    has = (answer_lengths(batch).view(-1, 2)[:, 1] > 0).to(ratios)
    rows = max(1, len(batch.seeds), ratios.shape[0])  # upper bound of the row index, known without reading the device
    sums, counts = (ratios.new_zeros(rows).index_add(0, row, value) for value in (ratios * has, has))
    return (sums / counts.clamp(min=1)).clamp(min=0).index_select(0, row)


TASK = KtoTask
