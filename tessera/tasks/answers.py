"""Share code of objectives over full answers: log-probabilities of answers, logistic losses of pairs, and the
reference model.

A batch has two answers for each sample: `pair` [T] has the answer index of each token: 2 n or 2 n + 1 for sample n,
and -1 for tokens outside of answers. `pair_ids` has one entry for each sample (see `data.kinds.preference`).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.config.reader import Section, build
from tessera.config.run_config import RunConfig
from tessera.core.batch import IGNORE, Batch
from tessera.core.outputs import LOGITS, Outputs, projection
from tessera.core.spec import Component, ModelSpec
from tessera.core.task import Counts, FrozenModule, Losses, LossTerm, Metric, Reference, Task
from tessera.errors import TesseraError
from tessera.lora.modules import without_adapters
from tessera.nn.moe import Balance
from tessera.ops.loss import token_log_probs
from tessera.ops.rows import take_rows
from tessera.runtime.distributed import World
from tessera.tasks import REFERENCE_MODEL

REFERENCE = "reference_log_probs"
PAIRS = "pairs"  # key of the number of pairs that losses are averaged over
_KINDS = {  # data.kind -> tasks that train on it
    "preference": "train.task=dpo, orpo, simpo or reward",
    "unpaired_preference": "train.task=kto",
}


class AnswerTask(Task):
    """Base of objectives over pairs of full answers."""

    name = "preference"  # name of the objective in messages
    reads: tuple[str, ...] = (LOGITS,)
    kind = "preference"  # required `data.kind`
    section: ClassVar[type[Section]]  # declares `train.task_options`
    options: Any

    def __init__(self, **options: Any) -> None:
        self.options = build(self.section, options, "train.task_options")

    def counts(self, batch: Batch) -> Counts:
        self.check_batch(batch)
        return {PAIRS: whole_pairs(batch).sum()}

    def check_batch(self, batch: Batch) -> None:
        """Raise unless the batch has pairs of answers."""
        if "pair" not in batch:
            raise TesseraError(
                f"{self.name} needs pairs of answers, and the batch has none",
                where="data.kind",
                fix=f"data.kind={self.kind} reads them",
                code="task.no-answer-pairs",
            )

    def check(self, config: RunConfig, module: nn.Module) -> None:
        if config.data.kind in _KINDS and config.data.kind != self.kind:
            raise TesseraError(
                f"{self.name} does not train on data of the kind {config.data.kind}",
                where="train.task and data.kind",
                fix=f"data.kind={self.kind}, or {_KINDS[config.data.kind]}",
                code="task.data-kind",
            )
        if any(part.coefficient > 0 for part in module.modules() if isinstance(part, Balance)):
            raise TesseraError(
                f"the task {self.name} does not support the load-balancing loss of experts",
                where=f"train.task={self.name}",
                fix="set output_router_logits: false for the model's experts",
                code="task.balance-loss",
            )

    def inputs(self, batch: Batch) -> Batch:
        if "token_index" in batch:
            raise TesseraError(
                f"{self.name} needs full answers on a rank, and parallel.cp splits them over ranks",
                where="parallel.cp",
                allowed=[1],
                code="task.no-context-parallel",
            )
        return batch


class AdaptersOff(Reference):
    """Compute the reference with adapters turned off."""

    def active(self, module: nn.Module) -> AbstractContextManager[None]:
        return without_adapters(module)

    def tensors(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        return {REFERENCE: answer_log_probs(outputs, batch)}


class ReferencedTask(AnswerTask):
    """Base of objectives that compare answers with a reference model.

    With adapters, the reference is the base model: the same weights with adapters turned off, also if training starts
    from trained adapters. Otherwise it is a frozen second copy of the model with its initial weights, sharded like the
    trained model. Each micro-batch runs through the reference first.
    """

    _frozen: FrozenModule | None = None

    @property
    def reference_free(self) -> bool:
        """Return whether the options of this task need no reference model."""
        return False

    @property
    def reference(self) -> Reference | None:
        return None if self.reference_free or self._frozen is not None else AdaptersOff()

    def check(self, config: RunConfig, module: nn.Module) -> None:
        super().check(config, module)
        if config.model.lora is not None and config.model.lora.modules_to_save and not self.reference_free:
            raise TesseraError(
                f"the reference of {self.name} is the model without adapters, and modules_to_save would change it",
                where="model.lora.modules_to_save",
                fix="remove model.lora.modules_to_save, or use simpo or orpo, which need no reference",
                code="task.modules-to-save",
            )

    def components(self, config: RunConfig, spec: ModelSpec) -> Mapping[str, Component]:
        if self.reference_free or config.model.lora is not None:
            return {}
        return {REFERENCE_MODEL: replace(spec.main, trained=False)}

    def setup(self, components: Mapping[str, FrozenModule], world: World) -> None:
        self._frozen = components.get(REFERENCE_MODEL)

    def inputs(self, batch: Batch) -> Batch:
        batch = super().inputs(batch)
        if self._frozen is None:
            return batch
        with self._frozen.use() as model:
            return batch.with_tensors(**{REFERENCE: answer_log_probs(model(batch), batch)})

    def compared(self, log_probs: Tensor, batch: Batch) -> Tensor:
        """Return log-probabilities of answers minus those by the reference model; unchanged if `reference_free`."""
        return log_probs if self.reference_free else log_probs - batch[REFERENCE]


def answer_log_probs(outputs: Outputs, batch: Batch) -> Tensor:
    """Return the log-probabilities of both answers of every pair in turn: [2 x pairs], in fp32.

    The better answer comes before the worse one; in data of KTO, the answer comes before the mismatched one.
    """
    hidden, head = projection(outputs, LOGITS)
    weight, labels, pair = head.weight, batch["labels"], batch["pair"]
    if "trained" in batch:  # skip the logits of questions, which are expensive
        hidden = take_rows(hidden, batch["trained"])
        labels, pair = (x.index_select(0, batch["trained"]) for x in (labels, pair))
    return sum_over_answers(token_log_probs(hidden.to(weight.dtype), weight, labels), pair, batch)


def answer_lengths(batch: Batch) -> Tensor:
    """Return the number of labelled tokens of each answer: [2 x pairs], in fp32."""
    return sum_over_answers((batch["labels"] != IGNORE).float(), batch["pair"], batch)


def whole_pairs(batch: Batch) -> Tensor:
    """Return a mask of the pairs that have labels in both answers. Masked samples have no labels."""
    return (answer_lengths(batch).view(-1, 2) > 0).all(1)


def sum_over_answers(values: Tensor, pair: Tensor, batch: Batch) -> Tensor:
    """Return the sum of values over the tokens of each answer."""
    answers = 2 * batch["pair_ids"].shape[0]
    index = pair.where(pair >= 0, answers)  # tokens outside of answers are summed in an extra entry
    return values.new_zeros(answers + 1).index_add(0, index, values)[:answers]


def logistic_losses(name: str, rewards: Tensor, batch: Batch, *, gamma: float = 0.0, smoothing: float = 0.0) -> Losses:
    """Return the logistic loss of the margins between `rewards` [2 x pairs] of better and worse answers, and metrics.

    The loss pushes the margin above `gamma`. `smoothing`: assumed share of pairs whose labels are swapped.
    """
    both, whole = rewards.view(-1, 2), whole_pairs(batch)
    margin = both[:, 0] - both[:, 1]
    loss = -(1 - smoothing) * F.logsigmoid(margin - gamma)
    if smoothing:
        loss = loss - smoothing * F.logsigmoid(gamma - margin)
    return Losses([LossTerm(name, loss.where(whole, 0.0).sum(), PAIRS)], pair_metrics(both, margin, whole))


@torch.no_grad()
def pair_metrics(rewards: Tensor, margin: Tensor, whole: Tensor) -> dict[str, Metric]:
    """Return the metrics of pairs. `rewards`: [pairs, 2], of better and worse answers. `margin`: [pairs]."""
    values = {
        "margin": margin,
        "accuracy": (margin > 0).float(),
        "reward_chosen": rewards[:, 0],
        "reward_rejected": rewards[:, 1],
    }
    return {name: Metric(value.where(whole, 0.0).sum(), PAIRS) for name, value in values.items()}
