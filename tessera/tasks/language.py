"""Next-token prediction, for text alone or with media: what is trained on is in the labels."""

from __future__ import annotations

from tessera.core.types import Batch, LanguageOutput, LossOut
from tessera.ops.loss import linear_cross_entropy


class LanguageTask:
    def inputs(self, batch: Batch) -> Batch:
        return batch

    def loss(self, outputs: LanguageOutput, batch: Batch) -> LossOut:
        weight = outputs.head.weight
        # `parallel.output_dtype` may have widened the hidden states; the product is taken in the head's type.
        total, count = linear_cross_entropy(outputs.hidden.to(weight.dtype), weight, batch["labels"])
        return LossOut(total, count)


TASK = LanguageTask
