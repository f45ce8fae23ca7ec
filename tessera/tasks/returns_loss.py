"""Train models that compute their own loss.

A model may return a scalar; a mapping with `loss` and perhaps `count`; or an object with such attributes (outputs of
`transformers` are both). Gradients of micro-batches and ranks are added and divided once, by the global `count`, so
that any split of a batch gives the same gradient. So a mean is first turned into a sum:

    reduction: mean (default)   the loss is a mean over `count` tokens or samples; it is multiplied by `count`
    reduction: sum              the loss is already a sum

`count` is the count that the model returns, else the number of labels in the batch tensor `count_labels`, else the
number of samples in the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from tessera.config.reader import Section, build
from tessera.core.batch import IGNORE, Batch
from tessera.core.task import Losses, LossTerm, Task
from tessera.errors import TesseraError

COUNT = "count"


class ReturnsLossOptions(Section):
    """Declare `train.task_options` of `ReturnsLossTask`."""

    reduction: Literal["mean", "sum"] = "mean"
    count_labels: str | None = None


class ReturnsLossTask(Task):
    """Use the scalar loss that the model returns.

    `reduction`: whether the loss is a mean or a sum. The number of tokens or samples that it covers is `count` of the
    outputs, else the number of labels in the batch tensor `count_labels`, else the number of samples.
    """

    def __init__(self, reduction: Literal["mean", "sum"] = "mean", count_labels: str | None = None) -> None:
        options = build(
            ReturnsLossOptions, {"reduction": reduction, "count_labels": count_labels}, "train.task_options"
        )
        self.reduction = options.reduction
        self.count_labels = options.count_labels

    def counts(self, batch: Batch) -> None:
        """Return None: the model may return the number of tokens or samples, so it is known only after forward."""

    def losses(self, outputs: Any, batch: Batch) -> Losses:
        loss = _part(outputs, "loss")
        if loss is None and isinstance(outputs, Tensor):
            loss = outputs
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise TesseraError(
                f"the model returned {_kind(outputs)}, which contains no scalar loss",
                where="train.task=returns_loss",
                allowed=["a scalar tensor", 'a mapping {"loss": ..., "count": ...}', "an object with .loss"],
                fix="return the loss from forward, or set train.task to the import path of your own task",
                code="task.no-loss-returned",
            )
        loss = loss.reshape(())
        count = self._count(outputs, batch, loss)
        # The mean of an empty micro-batch is nan, and nan times zero is nan: replace it by zero.
        total = loss if self.reduction == "sum" else torch.where(count > 0, loss, loss.new_zeros(())) * count
        return Losses([LossTerm("loss", total, COUNT)], counts={COUNT: count})

    def _count(self, outputs: Any, batch: Batch, loss: Tensor) -> Tensor:
        returned = _part(outputs, "count")
        if returned is not None:
            return torch.as_tensor(returned, device=loss.device).detach().reshape(())
        if self.count_labels is not None:
            labels = batch.get(self.count_labels)
            if labels is None:
                raise TesseraError(
                    f"the batch has no tensor {self.count_labels!r} to count",
                    where="train.task_options.count_labels",
                    allowed=batch.tensors,
                    code="task.no-labels-to-count",
                )
            return (labels != IGNORE).sum()
        return torch.tensor(_samples(batch), device=loss.device)


def _part(outputs: Any, name: str) -> Any:
    """Return `outputs[name]` or `outputs.name`; None if it is a method."""
    if isinstance(outputs, Tensor):
        return None
    if isinstance(outputs, Mapping):
        return outputs.get(name)
    value = getattr(outputs, name, None)
    return None if callable(value) else value  # `outputs` may be a tuple or a list, whose `count` is a method


def _samples(batch: Batch) -> int:
    if "samples" in batch.counts:
        return batch.counts["samples"]
    if batch.sample_ids:
        return len(batch.sample_ids)
    return next((len(tensor) for tensor in batch.tensors.values() if tensor.dim()), 1)


def _kind(outputs: Any) -> str:
    if isinstance(outputs, Tensor):
        return f"a tensor of shape {list(outputs.shape)}"
    if isinstance(outputs, Mapping):
        return f"a mapping with {', '.join(map(str, outputs)) or 'nothing'}"
    return f"a {type(outputs).__name__}"


TASK = ReturnsLossTask
