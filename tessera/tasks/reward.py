"""Train a reward model: one number for each answer, higher for the better one of a pair (Bradley and Terry).

    loss of a pair = -log s(r(better) - r(worse))  +  center (r(better) + r(worse))^2,   s: the logistic function

The reward of an answer is the output of the head at its last token, as transformers' classes for sequence
classification compute it. `center` keeps rewards around zero, because the loss alone depends on differences only.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from tessera.config.reader import Section
from tessera.config.run_config import RunConfig
from tessera.core.batch import Batch
from tessera.core.outputs import REWARDS, Outputs, projection
from tessera.core.task import Losses, LossTerm
from tessera.errors import TesseraError
from tessera.tasks.answers import PAIRS, AnswerTask, logistic_losses, whole_pairs


class RewardOptions(Section):
    """Declare `train.task_options` of `RewardTask`."""

    center: float = Field(0.0, ge=0, le=1e6, description="weight of the squared sum of both rewards of a pair")


class RewardTask(AnswerTask):
    """Train a reward for each answer, higher for the better answer of a pair."""

    name = "reward"
    reads = (REWARDS,)
    section = RewardOptions
    options: RewardOptions

    def check(self, config: RunConfig, module: nn.Module) -> None:
        super().check(config, module)
        if config.parallel.tp > 1:
            raise TesseraError(
                f"the head of a reward model has one row, which parallel.tp={config.parallel.tp} cannot split",
                where="parallel.tp",
                fix="parallel.tp=1: data ranks share the weights (parallel.shard), and a pipeline the layers",
                code="task.reward-tp",
            )

    def losses(self, outputs: Outputs, batch: Batch) -> Losses:
        rewards, center = answer_rewards(outputs, batch), self.options.center
        losses = logistic_losses("reward_loss", rewards, batch)
        if not center:
            return losses
        squares = rewards.view(-1, 2).sum(1).square().where(whole_pairs(batch), 0.0).sum()
        return replace(losses, terms=[*losses.terms, LossTerm("center_loss", squares, PAIRS, center)])


def answer_rewards(outputs: Outputs, batch: Batch) -> Tensor:
    """Return the reward of every answer, better and worse in turn: [2 x pairs], in fp32."""
    pair, answers = batch["pair"], 2 * batch["pair_ids"].shape[0]
    at = torch.arange(pair.shape[0], device=pair.device)
    # Index of the last token of each answer. Tokens outside of answers go to an extra entry. An answer without tokens
    # gets the reward of another token, but its pair is masked.
    last = pair.new_zeros(answers + 1).scatter_reduce(0, pair.where(pair >= 0, answers), at, "amax")[:answers]
    hidden, head = projection(outputs, REWARDS)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return F.linear(hidden.index_select(0, last).to(wide), head.weight.to(wide)).squeeze(1)


TASK = RewardTask
