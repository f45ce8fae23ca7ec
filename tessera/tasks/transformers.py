"""Cross-entropy on the logits of a `transformers` class. A batch holds keyword arguments of the class, and `labels`.

The class never sees the labels, so its own loss (a mean, whose count is lost) is not computed. The exception are
encoder-decoders without `decoder_input_ids`, which make these from the labels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from tessera.core.config import Section, build
from tessera.core.errors import TesseraError
from tessera.core.types import IGNORE, Batch, LossOut
from tessera.models.transformers.model import LABELS


class TransformersOptions(Section):
    """`train.task_options` of this task."""

    shift: bool | None = None


class TransformersTask:
    """`shift`: whether position i predicts label i + 1, as language models do. None: only encoder-decoders do not,
    as their decoder inputs are the labels shifted already."""

    def __init__(self, shift: bool | None = None) -> None:
        self.shift = build(TransformersOptions, {"shift": shift}, "train.task_options").shift

    def inputs(self, batch: Batch) -> Batch:
        if "labels" not in batch:
            raise TesseraError(
                "the batch has no `labels` to train on",
                where="data.kind",
                allowed=batch.tensors,
                fix="train.task=returns_loss uses the loss that the class itself returns",
            )
        others = {name: tensor for name, tensor in batch.tensors.items() if name != "labels"}
        return replace(batch, tensors={**others, LABELS: batch["labels"]})

    def loss(self, outputs: Any, batch: Batch) -> LossOut:
        logits, labels = getattr(outputs, "logits", None), batch[LABELS]
        if logits is None or logits.shape[:-1] != labels.shape:
            told = "no logits" if logits is None else f"logits of shape {list(logits.shape)}"
            raise TesseraError(
                f"{type(outputs).__name__} has {told}, the labels have shape {list(labels.shape)}",
                where="train.task=transformers",
                fix="train.task=returns_loss uses the loss that the class itself returns",
            )
        shift = not hasattr(outputs, "encoder_last_hidden_state") if self.shift is None else self.shift
        if shift:
            # The labels move, not the logits: a shifted view of those would be copied whole.
            labels = torch.cat([labels[..., 1:], torch.full_like(labels[..., :1], IGNORE)], dim=-1)
        total = F.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), ignore_index=IGNORE, reduction="sum")
        return LossOut(total, (labels != IGNORE).sum())


TASK = TransformersTask
