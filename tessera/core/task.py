"""Define the interface of objectives: counts, model inputs and loss terms.

A loss term is a *sum* with the name of its count. Counts are summed over all ranks and micro-batches before backward:

    loss = sum(term.weight * term.sum / global_counts[term.count] for term in terms)

So gradients need no division after backward, and any split of a global batch gives the same gradient.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tessera.config.run_config import RunConfig
from tessera.core.batch import Batch
from tessera.core.spec import Component, ModelSpec, Residence
from tessera.errors import TesseraError
from tessera.runtime import device as devices
from tessera.runtime.distributed import World

# Counts by name: an int if the host knows it, as from a shape; otherwise a tensor, for which the host does not wait.
Counts = Mapping[str, "int | Tensor"]


@dataclass(frozen=True)
class LossTerm:
    """Hold one term of the loss: a sum over the elements that `count` names, and its weight in the loss."""

    name: str
    sum: Tensor  # a scalar with a gradient
    count: str
    weight: float = 1.0


@dataclass(frozen=True)
class Metric:
    """Hold a number to report: a sum without gradient, which is divided by the global count of this name."""

    sum: Tensor
    count: str


@dataclass(frozen=True)
class Losses:
    """Hold the losses of one micro-batch."""

    terms: Sequence[LossTerm]
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    counts: Counts | None = None  # set only if `Task.counts` returned None


class Reference(Protocol):
    """Compute a reference with the trained model, for example without its adapters.

    The engine runs every micro-batch through it first, without gradient.
    """

    def active(self, module: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which `module` computes the reference."""
        ...

    def tensors(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        """Return tensors from the reference's outputs; they are added to the batch for the loss."""
        ...


class FrozenModule:
    """Hold a frozen component on this rank. An offloaded component is on the device only inside of `use`."""

    def __init__(self, module: nn.Module, device: torch.device, residence: Residence) -> None:
        self._module = module.requires_grad_(False).eval()
        self._device = device
        self._host: dict[nn.Parameter, Tensor] = {}
        if residence == "offloaded":
            pin = devices.supports(device, "pinned_memory")
            self._host = {p: p.data.pin_memory() if pin else p.data for p in module.parameters()}
            for buffer in module.buffers():  # small: they stay on the device
                buffer.data = buffer.data.to(device)

    @contextmanager
    def use(self) -> Iterator[nn.Module]:
        """Return a context in which the module can be called on the device, without gradient."""
        for parameter, on_host in self._host.items():
            parameter.data = on_host.to(self._device, non_blocking=True)
        try:
            with torch.no_grad():
                yield self._module
        finally:
            for part in self._module.modules():
                if isinstance(
                    part, FSDPModule
                ):  # FSDP frees the root's gathered weights in backward, which does not run here
                    part.reshard()
            for parameter, on_host in self._host.items():  # weights do not change: nothing is copied back
                parameter.data = on_host


class Task(ABC):
    """Define an objective. Subclasses write `counts` and `losses`; everything else has a default.

    The order of calls: `bind`; `check` on the unsharded model; `components`; `setup` once the modules of this rank
    exist. Then for each micro-batch: `prepare` on the host, `encode`, `counts`, `inputs`, `forward` and `losses`.
    """

    reads: tuple[str, ...] = ()  # names of the model's outputs that `losses` needs; see `core.outputs`

    def bind(self, spec: ModelSpec, config: Any) -> None:  # noqa: B027
        """Keep facts of the model family and the model's configuration."""

    def check(self, config: RunConfig, module: nn.Module) -> None:  # noqa: B027, not every task has something to check
        """Raise a `TesseraError` if this objective cannot train the model. `module`: unsharded, on the meta device."""

    def components(self, config: RunConfig, spec: ModelSpec) -> Mapping[str, Component]:
        """Return the frozen models that the task uses, by name. No checkpoint stores them.

        `replace(spec.main, trained=False)` is a second copy of the model with its initial weights.
        """
        return {}

    def setup(self, components: Mapping[str, FrozenModule], world: World) -> None:  # noqa: B027
        """Keep the frozen models of this rank, with their weights. A pipeline stage has only those that it needs."""

    def compile(self) -> None:  # noqa: B027
        """Prefer compiled operations: called when the run compiles blocks (`parallel.compile`)."""

    @property
    def reference(self) -> Reference | None:
        """Return how to compute the trained model as a reference; None where the task has none."""
        return None

    def prepare(self, batch: Batch) -> Batch:
        """Return the batch with tensors that the host computes ahead. The loader calls it before a batch of a training
        step goes to the device, in its copying thread where it has one, while earlier steps compute."""
        return batch

    @property
    def encode_steps(self) -> int:
        """Return how many training steps are encoded together, before the first of them."""
        return 1

    def encode(self, batches: Sequence[Batch]) -> list[Batch]:
        """Return micro-batches with the outputs of frozen encoders. Runs on the device, without gradient.

        In a pipeline only the first stage runs it, where there are components of this stage; the results are sent to
        the others. Batches that are encoded already are returned as they are.
        """
        return list(batches)

    @abstractmethod
    def counts(self, batch: Batch) -> Counts | None:
        """Return how many elements each count of this micro-batch has, before the model runs.

        None where only the model's outputs tell: then `losses` returns the counts, all terms share one count, and
        gradients are divided after backward.
        """

    def inputs(self, batch: Batch) -> Batch:
        """Return the inputs of the model. Runs without gradient, on every pipeline stage: noise and targets belong
        here."""
        return batch

    def model_inputs(self, batch: Batch) -> Batch:
        """Return `inputs` of a batch, which also asks the model for every output that the task reads."""
        return replace(self.inputs(batch), outputs=self.reads)

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """Return the model's outputs by name. A pipeline runs stages instead and refuses a task that overrides this."""
        return model(batch)

    @abstractmethod
    def losses(self, outputs: Any, batch: Batch) -> Losses:
        """Return the loss terms and metrics of one micro-batch, given what `inputs` returned for it."""


@dataclass(frozen=True)
class SumSpec:
    """Describe one summed number: its name, its count, and its weight in the loss; None for a metric."""

    name: str
    count: str
    weight: float | None = None


@dataclass(frozen=True)
class LossTotals:
    """Hold sums of terms and metrics over micro-batches and ranks, and the counts to divide them by, on the device."""

    specs: tuple[SumSpec, ...]
    sums: Tensor  # [specs]
    counts: dict[str, Tensor]

    def loss(self) -> Tensor:
        """Return the weighted sum of the means of all terms."""
        parts = [spec.weight * self._mean(at) for at, spec in enumerate(self.specs) if spec.weight is not None]
        total: Tensor = sum(parts[1:], start=parts[0])
        return total

    def metrics(self) -> dict[str, Tensor]:
        """Return the means of all metrics; with several terms also the mean of each term, without its weight."""
        several = sum(spec.weight is not None for spec in self.specs) > 1
        reported = [at for at, spec in enumerate(self.specs) if spec.weight is None or several]
        return {self.specs[at].name: self._mean(at) for at in reported}

    def counted(self) -> dict[str, Tensor]:
        """Return for each metric whether its count is above zero; otherwise it has no value."""
        return {spec.name: self.counts[spec.count] > 0 for spec in self.specs if spec.weight is None}

    def held_out_loss(self) -> Tensor:
        """Return the loss of an evaluation; raise if all counts are zero, since all samples were masked."""
        if not any(bool(self.counts[spec.count] > 0) for spec in self.specs if spec.weight is not None):
            raise TesseraError(
                "no held-out sample can be used, so there is no loss",
                where="data.eval",
                fix="correct the data: `tessera data doctor --decode --recipe RECIPE` lists the faults",
                code="evaluation.no-usable-sample",
            )
        return self.loss()

    def _mean(self, at: int) -> Tensor:
        return self.sums[at] / self.counts[self.specs[at].count].clamp(min=1)

    def __add__(self, other: LossTotals) -> LossTotals:
        counts = {name: value + other.counts[name] for name, value in self.counts.items()}
        return LossTotals(self.specs, self.sums + other.sums, counts)
