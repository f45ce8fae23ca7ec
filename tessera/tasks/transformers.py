"""Train by cross-entropy on the logits of a `transformers` class: a batch holds its keyword arguments and `labels`.

The class does not get the labels, so it does not compute its own loss, a mean over an unknown number of tokens. The
exception are encoder-decoders without `decoder_input_ids`, which make these from the labels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.config.reader import Section, build
from tessera.core.batch import IGNORE, Batch
from tessera.core.task import Counts, Losses, LossTerm, Task
from tessera.errors import TesseraError
from tessera.models.transformers.model import LABELS


class TransformersOptions(Section):
    """Declare `train.task_options` of `TransformersTask`."""

    shift: bool | None = None


class TransformersTask(Task):
    """Train a class of transformers by the cross-entropy of its logits.

    `shift`: whether position i predicts label i + 1, as in language models. None: True except for encoder-decoders,
    whose decoder inputs are already shifted.
    """

    def __init__(self, shift: bool | None = None) -> None:
        self.shift = build(TransformersOptions, {"shift": shift}, "train.task_options").shift

    def counts(self, batch: Batch) -> Counts | None:
        """Return the number of labels; None if `shift` is None, because the number then depends on the outputs."""
        return None if self.shift is None else {"labels": (self._targets(batch["labels"], self.shift) != IGNORE).sum()}

    def inputs(self, batch: Batch) -> Batch:
        if "labels" not in batch:
            raise TesseraError(
                "the batch has no `labels` to train on",
                where="data.kind",
                allowed=batch.tensors,
                fix="train.task=returns_loss uses the loss that the class itself returns",
                code="task.no-labels",
            )
        others = {name: tensor for name, tensor in batch.tensors.items() if name != "labels"}
        return replace(batch, tensors={**others, LABELS: batch["labels"]})

    def losses(self, outputs: Any, batch: Batch) -> Losses:
        logits, labels = getattr(outputs, "logits", None), batch[LABELS]
        # A classifier has logits [samples, classes] and one label per sample. To shift labels would give each sample
        # the label of the next one, so raise an error.
        classifies = logits is not None and logits.dim() == 2 and self.shift is not False
        if logits is None or logits.shape[:-1] != labels.shape or classifies:
            shape = "no logits" if logits is None else f"logits of shape {list(logits.shape)}"
            raise TesseraError(
                f"{type(outputs).__name__} has {shape}, the labels have shape {list(labels.shape)}",
                where="train.task=transformers",
                fix="train.task=returns_loss uses the loss that the class itself returns; for a classifier, "
                "train.task_options.shift=false",
                code="task.label-shape",
            )
        shift = not hasattr(outputs, "encoder_last_hidden_state") if self.shift is None else self.shift
        labels = self._targets(labels, shift)
        total = F.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), ignore_index=IGNORE, reduction="sum")
        return Losses([LossTerm("loss", total, "labels")], counts={"labels": (labels != IGNORE).sum()})

    @staticmethod
    def _targets(labels: Tensor, shift: bool) -> Tensor:
        """Return the label of every position. Labels are shifted, not logits, which would be a large copy."""
        return torch.cat([labels[..., 1:], torch.full_like(labels[..., :1], IGNORE)], dim=-1) if shift else labels


TASK = TransformersTask
