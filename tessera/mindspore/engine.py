"""Run the forward and backward passes of an optimizer step on MindSpore."""

from __future__ import annotations

from collections.abc import Sequence

import mindspore as ms
import torch
from mindspore import ops

from tessera.core.batch import Batch
from tessera.core.task import Losses, LossTerm, LossTotals, Task
from tessera.mindspore.functions import Tensor, to_torch
from tessera.mindspore.model import LossInputs, Network
from tessera.mindspore.state import DeviceState
from tessera.parallel.engine import global_counts, reduce_losses, specs_of
from tessera.runtime.gradients import LossScale
from tessera.tasks.language import LABELS, LANGUAGE_LOSS

HOST = torch.device("cpu")


class MindSporeEngine:
    """Compute losses and gradients of the language task with `mindspore.value_and_grad`.

    Counts and losses are summed over ranks by torch's process group on the host; gradients by MindSpore.
    """

    def __init__(self, network: Network, state: DeviceState, ranks: int = 1) -> None:
        self.loss_scale: LossScale | None = None
        self.microbatch: int | None = None
        self._network, self._state = network, state
        self._sum_over_ranks = ops.AllReduce() if ranks > 1 else None

    def encode(self, task: Task, microbatches: Sequence[Batch]) -> list[Batch]:
        return task.encode(microbatches)

    def step(self, task: Task, microbatches: Sequence[Batch]) -> LossTotals:
        counts = global_counts(task, microbatches, HOST, None)
        assert counts is not None, "the language task counts labels before forward"
        factor = 1.0 / max(float(counts[LABELS]), 1.0)
        trained = self._state.trained
        sums: list[Losses] = []

        def loss(inputs: LossInputs) -> tuple[Tensor, Tensor]:
            total = self._network.loss(self._state.weights, inputs)
            return total * factor, total

        gradient = ms.value_and_grad(loss, None, list(trained.values()), has_aux=True)
        for number, batch in enumerate(microbatches):
            self.microbatch = number
            (_, total), gradients = gradient(self._inputs(batch))
            self._state.add_gradients(dict(zip(trained, gradients, strict=True)))
            sums.append(_losses(total))
        self.microbatch = None
        if self._sum_over_ranks is not None:
            self._state.map_gradients(self._sum_over_ranks)
        return reduce_losses(sums, specs_of(sums[0]), counts, HOST, None)

    def evaluate(self, task: Task, batch: Batch, counts: bool) -> LossTotals:
        losses = _losses(self._network.loss(self._state.weights, self._inputs(batch)))
        total = global_counts(task, [batch], HOST, None, counts)
        return reduce_losses([losses] if counts else [], specs_of(losses), total, HOST, None)

    def settle(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy weights and optimizer state, which were loaded on the host, to MindSpore."""
        self._state.load(optimizer)

    def collect(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy weights and optimizer state to the host, where they are saved."""
        self._state.store(optimizer)

    def _inputs(self, batch: Batch) -> LossInputs:
        return self._network.inputs(batch, self._state.dtype)


def _losses(total: Tensor) -> Losses:
    return Losses([LossTerm(LANGUAGE_LOSS, to_torch(total), LABELS)])
