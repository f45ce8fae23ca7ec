"""A step run again with ears: what every module gave and got back, and the loss of every micro-batch, on this rank.

Hooks keep one number per tensor, its largest absolute value (nan and infinity survive that), on the device; all of them
are read together when the step is over.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from tessera.core.names import clean
from tessera.core.tensors import local_part
from tessera.core.types import Batch, LossOut, Task
from tessera.parallel.engine import Engine

Moment = Literal["forward", "output", "input"]  # what a module gave; the gradient of that; the gradient of what it got


@dataclass(frozen=True)
class Event:
    """A tensor that came by. `tensor` tells those apart whose gradients did."""

    moment: Moment
    module: str
    microbatch: int
    largest: float
    before: float = 0.0  # forward: the same of what went in
    tensor: int = -1

    @property
    def fine(self) -> bool:
        return math.isfinite(self.largest)


@dataclass(frozen=True)
class Heard:
    events: list[Event]
    losses: dict[int, tuple[float, float]]  # sum and count by micro-batch, where this rank computes them

    def fine(self, microbatch: int) -> bool:
        loss = self.losses.get(microbatch, (0.0, 0.0))[0]
        return math.isfinite(loss) and all(e.fine for e in self.events if e.microbatch == microbatch)

    def pull(self, microbatch: int) -> float:
        """How strongly a micro-batch pulls at the weights: squares of the gradients that came by, added up."""
        found = (e.largest for e in self.events if e.moment == "output" and e.microbatch == microbatch)
        return math.fsum(min(value, 1e150) ** 2 for value in found if math.isfinite(value))


def listen(module: nn.Module, engine: Engine, task: Task, microbatches: Sequence[Batch]) -> Heard:
    """Runs a step, of which only gradients remain; compiled modules run as they were written."""
    ear = _Ear()
    hearing = _HearingTask(task, microbatches, ear)
    with _hooks(module, ear), torch.compiler.set_stance("force_eager"):
        engine.step(hearing, microbatches)
    losses = {number: (float(out.sum), float(out.count)) for number, out in hearing.losses.items()}
    return Heard(ear.events(), losses)


@dataclass
class _Note:
    moment: Moment
    module: str
    microbatch: int
    largest: Tensor
    before: Tensor | None = None
    tensor: int = -1


@dataclass
class _Ear:
    notes: list[_Note] = field(default_factory=list)
    microbatch: int = 0
    known: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    numbers: int = 0

    def hear(self, name: str) -> Callable[[nn.Module, Any, Any, Any], None]:
        def after(module: nn.Module, inputs: Any, keywords: Any, output: Any) -> None:
            entered, left = list(_tensors((inputs, keywords))), list(_tensors(output))
            largest = _largest(left)
            if largest is not None:
                self.notes.append(_Note("forward", name, self.microbatch, largest, _largest(entered)))
            for tensor in left:
                self._follow("output", name, tensor)
            for tensor in entered:
                self._follow("input", name, tensor)

        return after

    def _follow(self, moment: Moment, name: str, tensor: Tensor) -> None:
        if not (tensor.requires_grad and tensor.is_floating_point()):
            return
        if tensor not in self.known:
            self.known[tensor] = self.numbers
            self.numbers += 1
        number, microbatch = self.known[tensor], self.microbatch

        def came(gradient: Tensor) -> None:
            largest = _largest([gradient])
            if largest is not None:
                self.notes.append(_Note(moment, name, microbatch, largest, tensor=number))

        tensor.register_hook(came)  # type: ignore[no-untyped-call]

    def events(self) -> list[Event]:
        if not self.notes:
            return []
        zero = torch.zeros((), device=self.notes[0].largest.device)
        pairs = [torch.stack([n.largest.to(zero), zero if n.before is None else n.before.to(zero)]) for n in self.notes]
        read = torch.stack(pairs).tolist()
        return [
            Event(n.moment, n.module, n.microbatch, largest, before, n.tensor)
            for n, (largest, before) in zip(self.notes, read, strict=True)
        ]


class _HearingTask:
    """The task itself; on the way it tells which micro-batch is at work, and keeps its loss."""

    def __init__(self, task: Task, microbatches: Sequence[Batch], ear: _Ear) -> None:
        self._task = task
        self._numbers = {id(batch): number for number, batch in reversed(list(enumerate(microbatches)))}
        self._made: list[tuple[Batch, int]] = []
        self._ear = ear
        self.losses: dict[int, LossOut] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def inputs(self, batch: Batch) -> Batch:
        self._ear.microbatch = self._numbers[id(batch)]
        made = self._task.inputs(batch)
        self._made.append((made, self._ear.microbatch))
        return made

    def loss(self, outputs: Any, batch: Batch) -> LossOut:
        out = self._task.loss(outputs, batch)
        number = next(number for made, number in reversed(self._made) if made is batch)
        self.losses[number] = LossOut(out.sum.detach(), out.count)
        return out


@contextlib.contextmanager
def _hooks(module: nn.Module, ear: _Ear) -> Iterator[None]:
    handles = []
    for name, part in module.named_modules():
        name = clean(f"{name}.").rstrip(".")
        handles.append(part.register_forward_hook(ear.hear(name or "the model"), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _largest(tensors: Sequence[Tensor]) -> Tensor | None:
    found = [local_part(t).detach() for t in tensors if t.is_floating_point()]
    values = [t.abs().amax().float() for t in found if t.numel()]
    return None if not values else values[0] if len(values) == 1 else torch.stack(values).amax()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Batch):
        yield from value.tensors.values()
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, (tuple, list)):
        for inner in value:
            yield from _tensors(inner)
