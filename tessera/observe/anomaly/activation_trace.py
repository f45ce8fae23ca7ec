"""Run a step again and record the outputs and gradients of every module, and the loss of every micro-batch.

Hooks store the largest absolute value of each tensor, which is nan or infinite if the tensor has such a value. The
values are copied to the host together at the end of the step. Each rank records the tensors that it computes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tessera.core.batch import Batch
from tessera.core.engine import TrainingEngine
from tessera.core.task import Counts, Losses, Reference, Task
from tessera.runtime.modules import clean_name, local_shard

Moment = Literal["output", "gradient"]  # recorded tensor: a module's output, or its gradient in backward


@dataclass(frozen=True)
class TensorRecord:
    """Describe the outputs of a module in one micro-batch, or the gradient of one output."""

    moment: Moment
    module: str
    microbatch: int
    largest: float = 0.0  # largest absolute value
    before: float = 0.0  # largest absolute value of the module's inputs; only for "output"

    @property
    def finite(self) -> bool:
        return math.isfinite(self.largest)


@dataclass(frozen=True)
class ActivationTrace:
    """Hold the tensors and losses that this rank computed in one traced step."""

    records: list[TensorRecord]
    losses: dict[int, tuple[float, float]]  # micro-batch -> its summed loss, and its number of tokens or samples

    def finite(self, microbatch: int) -> bool:
        loss = self.losses.get(microbatch, (0.0, 0.0))[0]
        return math.isfinite(loss) and all(e.finite for e in self.records if e.microbatch == microbatch)

    def grad_sq(self, microbatch: int) -> float:
        """Estimate the squared gradient norm of a micro-batch: sum the squared largest gradients of module outputs."""
        values = (e.largest for e in self.records if e.moment == "gradient" and e.microbatch == microbatch)
        return math.fsum(min(value, 1e150) ** 2 for value in values if math.isfinite(value))


def trace_step(module: nn.Module, engine: TrainingEngine, task: Task, microbatches: Sequence[Batch]) -> ActivationTrace:
    """Run forward and backward of a step without an update. Compiled modules run uncompiled, so that hooks run."""
    recorder = _Recorder()
    microbatches = engine.encode(task, microbatches)
    traced = _TracedTask(task, microbatches, recorder)
    with _hooks(module, recorder), torch.compiler.set_stance("force_eager"):
        engine.step(traced, microbatches)
    losses = {number: (float(loss), float(count)) for number, (loss, count) in traced.sums.items()}
    return ActivationTrace(recorder.records(), losses)


class _Recorder:
    """Record outputs and gradients of modules with hooks. The values stay on the device until `records` reads them."""

    def __init__(self) -> None:
        self.microbatch = 0
        # (record, device tensor of its `largest`, device tensor of its `before`)
        self._pending: list[tuple[TensorRecord, Tensor, Tensor | None]] = []

    def hook(self, name: str) -> Callable[[nn.Module, Any, Any, Any], None]:
        def after(module: nn.Module, inputs: Any, keywords: Any, output: Any) -> None:
            outputs = list(tensors_in(output))
            self._add(TensorRecord("output", name, self.microbatch), outputs, list(tensors_in((inputs, keywords))))
            record = TensorRecord("gradient", name, self.microbatch)
            for tensor in outputs:
                if tensor.requires_grad and tensor.is_floating_point():
                    tensor.register_hook(lambda gradient: self._add(record, [gradient]))  # type: ignore[no-untyped-call]

        return after

    def _add(self, record: TensorRecord, tensors: Sequence[Tensor], before: Sequence[Tensor] = ()) -> None:
        largest = _largest(tensors)
        if largest is not None:
            self._pending.append((record, largest, _largest(before)))

    def records(self) -> list[TensorRecord]:
        if not self._pending:
            return []
        zero = torch.zeros((), device=self._pending[0][1].device)
        pairs = [
            torch.stack([largest.to(zero), zero if before is None else before.to(zero)])
            for _, largest, before in self._pending
        ]
        values = torch.stack(pairs).tolist()
        return [
            replace(record, largest=largest, before=before)
            for (record, _, _), (largest, before) in zip(self._pending, values, strict=True)
        ]


class WrappedTask(Task):
    """Pass calls on to another task, which has encoded the micro-batches already."""

    def __init__(self, task: Task) -> None:
        self._task = task

    @property
    def reads(self) -> tuple[str, ...]:  # type: ignore[override]
        return self._task.reads

    @property
    def reference(self) -> Reference | None:
        return self._task.reference

    def counts(self, batch: Batch) -> Counts | None:
        return self._task.counts(batch)

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        return self._task.forward(model, batch)


class _TracedTask(WrappedTask):
    """Record the index of the current micro-batch, and its loss.

    The loss is not divided by the number of tokens. Then gradients are those of the *summed* loss, and can be compared
    between probes with different numbers of tokens.
    """

    def __init__(self, task: Task, microbatches: Sequence[Batch], recorder: _Recorder) -> None:
        super().__init__(task)
        self._numbers = {id(batch): number for number, batch in reversed(list(enumerate(microbatches)))}
        self._recorder = recorder
        self._counts: dict[int, Counts | None] = {}
        self.sums: dict[int, tuple[Tensor, Tensor]] = {}  # micro-batch -> its summed loss, number of tokens or samples

    def counts(self, batch: Batch) -> Counts | None:
        counts = self._task.counts(batch)
        self._counts[self._numbers[id(batch)]] = counts
        return None if counts is None else dict.fromkeys(counts, 1)

    def inputs(self, batch: Batch) -> Batch:
        self._recorder.microbatch = self._numbers[id(batch)]
        return self._task.inputs(batch)

    def losses(self, outputs: Any, batch: Batch) -> Losses:
        losses = self._task.losses(outputs, batch)
        number = self._recorder.microbatch
        counts = self._counts.get(number) or losses.counts or {}
        values = {n: torch.as_tensor(counts.get(n, 1)).to(losses.terms[0].sum) for n in {t.count for t in losses.terms}}
        mean = sum(term.weight * term.sum.detach() / values[term.count].clamp(min=1) for term in losses.terms)
        count = values[losses.terms[0].count]
        self.sums[number] = (mean * count, count)
        return losses


@contextlib.contextmanager
def _hooks(module: nn.Module, recorder: _Recorder) -> Iterator[None]:
    handles = []
    for name, part in module.named_modules():
        name = clean_name(f"{name}.").rstrip(".")
        handles.append(part.register_forward_hook(recorder.hook(name or "the model"), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _largest(tensors: Sequence[Tensor]) -> Tensor | None:
    shards = [local_shard(t).detach() for t in tensors if t.is_floating_point()]
    values = [shard.abs().amax().float() for shard in shards if shard.numel()]
    return None if not values else values[0] if len(values) == 1 else torch.stack(values).amax()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a module's inputs or outputs."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Batch):
        yield from value.tensors.values()
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from tensors_in(inner)
    elif isinstance(value, (tuple, list)):
        for inner in value:
            yield from tensors_in(inner)
