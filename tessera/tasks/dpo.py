"""Train by direct preference optimisation: the better of two answers should become likelier than the worse, by more
than it already was for a reference.

The reference is the model as it was. With adapters that is the model without them, which costs no memory; otherwise it
is a frozen second copy of the model, sharded like the first one. Each micro-batch runs through it first.
`reference_free` compares with nothing.

    loss of a pair = -(1 - e) log s(m) - e log s(-m),   s: the logistic function, e: label_smoothing
    m = beta ((log p(better) - log p(worse)) - (the same of the reference))

Losses add up over pairs and are divided once, by the pairs of the global batch: any split of it trains alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from tessera.core.config import Section, build
from tessera.core.dist import World
from tessera.core.errors import TesseraError
from tessera.core.run_config import RunConfig
from tessera.core.task import Counts, FrozenModule, Losses, LossTerm, Metric, Reference, Task
from tessera.core.types import IGNORE, Batch, LanguageOutput
from tessera.nn.lora import without_adapters
from tessera.nn.moe import Balance
from tessera.ops.loss import take_rows, token_log_probs
from tessera.tasks import REFERENCE_MODEL

REFERENCE = "reference_log_probs"
PAIRS = "pairs"  # the count


class AdaptersOff(Reference):
    """Turn adapters off: the reference is the model as it was before it was adapted."""

    def active(self, module: nn.Module) -> AbstractContextManager[None]:
        return without_adapters(module)

    def tensors(self, outputs: LanguageOutput, batch: Batch) -> dict[str, Tensor]:
        return {REFERENCE: answer_log_probs(outputs, batch)}


class DpoOptions(Section):
    """Declare `train.task_options` of `DpoTask`."""

    beta: float = Field(0.1, gt=0, le=1e6)
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="the share of pairs that are taken to be the wrong way round"
    )
    reference_free: bool = False


class DpoTask(Task):
    """Compare the log-probabilities of two answers with those of a reference."""

    def __init__(self, beta: float = 0.1, label_smoothing: float = 0.0, reference_free: bool = False) -> None:
        given = {"beta": beta, "label_smoothing": label_smoothing, "reference_free": reference_free}
        options = build(DpoOptions, given, "train.task_options")
        self.beta = options.beta
        self.smoothing = options.label_smoothing
        self._reference_free = options.reference_free
        self._frozen: FrozenModule | None = None

    @property
    def reference(self) -> Reference | None:
        return None if self._reference_free or self._frozen is not None else AdaptersOff()

    def counts(self, batch: Batch) -> Counts:
        if "pair" not in batch:
            raise TesseraError(
                "the batch has no pairs of answers", where="data.kind", fix="data.kind=preference reads them"
            )
        return {PAIRS: self._whole_pairs(batch).sum()}

    @staticmethod
    def _whole_pairs(batch: Batch) -> Tensor:
        """Return which pairs have labels in both answers: a sample that could not be read leaves a hole without."""
        return (_summed((batch["labels"] != IGNORE).float(), batch["pair"], batch).view(-1, 2) > 0).all(1)

    def check(self, config: RunConfig, module: nn.Module) -> None:
        if any(part.coefficient > 0 for part in module.modules() if isinstance(part, Balance)):
            raise TesseraError(
                "dpo has no loss that keeps experts evenly used",
                where="train.task=dpo",
                fix="set output_router_logits: false for the model's experts",
            )
        if REFERENCE_MODEL in self.frozen_components(config) and config.parallel.pp > 1:
            raise TesseraError(
                "dpo of a whole model compares with a second copy of it, which is not split over pipeline stages",
                where="parallel.pp",
                fix="train adapters (model.lora: {}), which need no second copy, or shard the model: parallel.pp=1",
            )

    def frozen_components(self, config: RunConfig) -> Sequence[str]:
        return () if self._reference_free or config.model.lora is not None else (REFERENCE_MODEL,)

    def setup(self, components: Mapping[str, FrozenModule], world: World) -> None:
        self._frozen = components.get(REFERENCE_MODEL)

    def inputs(self, batch: Batch) -> Batch:
        if "token_index" in batch:
            raise TesseraError(
                "dpo needs whole answers on a rank, and with parallel.cp ranks share them",
                where="parallel.cp",
                allowed=[1],
            )
        if self._frozen is None:
            return batch
        with self._frozen.use() as model:
            return batch.with_tensors(**{REFERENCE: answer_log_probs(model(batch), batch)})

    def losses(self, outputs: LanguageOutput, batch: Batch) -> Losses:
        found = answer_log_probs(outputs, batch).view(-1, 2)
        before = torch.zeros_like(found) if self._reference_free else batch[REFERENCE].view(-1, 2)
        whole = self._whole_pairs(batch)
        rewards = self.beta * (found - before)
        margin = rewards[:, 0] - rewards[:, 1]
        losses = -(1 - self.smoothing) * F.logsigmoid(margin) - self.smoothing * F.logsigmoid(-margin)
        with torch.no_grad():
            values = {
                "margin": margin,
                "accuracy": (margin > 0).float(),
                "reward_chosen": rewards[:, 0],
                "reward_rejected": rewards[:, 1],
            }
            metrics = {name: Metric(value.where(whole, 0.0).sum(), PAIRS) for name, value in values.items()}
        return Losses([LossTerm("dpo_loss", losses.where(whole, 0.0).sum(), PAIRS)], metrics)


def answer_log_probs(outputs: LanguageOutput, batch: Batch) -> Tensor:
    """Return the log-probabilities of the answers of every pair, better and worse in turn: [2 x pairs], in fp32."""
    weight, hidden, labels, pair = outputs.head.weight, outputs.hidden, batch["labels"], batch["pair"]
    if "trained" in batch:  # logits are expensive, and those of questions are not needed
        hidden = take_rows(hidden, batch["trained"])
        labels, pair = (x.index_select(0, batch["trained"]) for x in (labels, pair))
    return _summed(token_log_probs(hidden.to(weight.dtype), weight, labels), pair, batch)


def _summed(values: Tensor, pair: Tensor, batch: Batch) -> Tensor:
    """Return the sums of values over the tokens of each answer; values of other tokens are left out."""
    answers = 2 * batch["pair_ids"].shape[0]
    index = pair.where(pair >= 0, answers)  # tokens of no answer are summed behind the last one
    return values.new_zeros(answers + 1).index_add(0, index, values)[:answers]


TASK = DpoTask
