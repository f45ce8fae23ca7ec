"""Next-token prediction, for text alone or with media: what is trained on is in the labels."""

from __future__ import annotations

from tessera.core.types import Batch, LanguageOutput, LossOut
from tessera.ops.loss import linear_cross_entropy
from tessera.ops.registry import AUTO
from tessera.ops.rows import take_rows

ROUTER_AUX = "router_aux_loss"  # the metric: before its weight, as a mean over trained tokens


class LanguageTask:
    def __init__(self) -> None:
        self._implementation = AUTO

    def compile(self) -> None:
        """Of a run that compiles what it can."""
        self._implementation = "compiled"

    def inputs(self, batch: Batch) -> Batch:
        return batch

    def loss(self, outputs: LanguageOutput, batch: Batch) -> LossOut:
        weight, hidden, labels = outputs.head.weight, outputs.hidden, batch["labels"]
        # Logits are dear, and of pictures and questions nobody asks for them.
        if "trained" in batch:
            hidden, labels = take_rows(hidden, batch["trained"]), labels.index_select(0, batch["trained"])
        # `parallel.output_dtype` may have widened the hidden states; the product is taken in the head's type.
        total, count = linear_cross_entropy(
            hidden.to(weight.dtype), weight, labels, implementation=self._implementation
        )
        if outputs.router_aux is None:
            return LossOut(total, count)
        aux = outputs.router_aux
        return LossOut(total + outputs.router_aux_weight * aux, count, {ROUTER_AUX: aux.detach()})


TASK = LanguageTask
