"""Define the interface of objectives: counts, model inputs and loss terms.

A loss term is a *sum* with the name of its count, the number of tokens or samples that it is averaged over. Counts are
summed over all ranks and micro-batches before backward:

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

# Name -> number of tokens or samples that terms are averaged over. An int if the host knows it, as from a shape;
# otherwise a tensor, for which the host does not wait.
Counts = Mapping[str, "int | Tensor"]


@dataclass(frozen=True)
class LossTerm:
    """Hold one term of the loss: its sum over tokens or samples, the name of the count to divide it by, its weight."""

    name: str
    sum: Tensor  # scalar that requires a gradient
    count: str
    weight: float = 1.0

    def __post_init__(self) -> None:
        """Raise if the sum is not a tensor."""
        if not isinstance(self.sum, Tensor):
            raise TesseraError(
                f"the sum of the loss term {self.name!r} is a {type(self.sum).__name__}, not a tensor",
                where="Task.losses",
                fix="give the summed loss as a scalar tensor; `total, count = linear_cross_entropy(...)` returns two",
                code="task.loss-not-tensor",
            )


@dataclass(frozen=True)
class Metric:
    """Hold a metric to report: a sum without gradient, and the name of the global count to divide it by."""

    sum: Tensor
    count: str


@dataclass(frozen=True)
class Losses:
    """Hold the losses of one micro-batch."""

    terms: Sequence[LossTerm]
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    counts: Counts | None = None  # numbers of tokens or samples to divide by; None: `Task.counts` has returned them


class Reference(Protocol):
    """Use the trained model as a reference model, for example without its adapters.

    The engine first runs every micro-batch through the reference, without gradient.
    """

    def active(self, module: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which `module` computes as the reference model."""
        ...

    def tensors(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        """Return tensors that `losses` needs, computed from the reference's outputs, such as log-probabilities."""
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
            for buffer in module.buffers():  # buffers are small and stay on the device
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
                # Free gathered weights: FSDP frees those of the root only in backward, which does not run here.
                if isinstance(part, FSDPModule):
                    part.reshard()
            for parameter, on_host in self._host.items():  # frozen weights do not change, so nothing is copied back
                parameter.data = on_host


class Task(ABC):
    """Define an objective. Subclasses write `counts` and `losses`; everything else has a default.

    The order of calls: `bind`; `check` on the unsharded model; `components`; `setup` once the modules of this rank
    exist. Then for each micro-batch: `prepare` on the host, `encode`, `inputs`, `forward` and `losses`. In training
    `counts` is called before `inputs`, for all micro-batches of a step, which may already be encoded.
    """

    reads: tuple[str, ...] = ()  # names of the model's outputs that `losses` needs; see `core.outputs`

    def bind(self, spec: ModelSpec, config: Any) -> None:  # noqa: B027
        """Store what the task needs of the model family and of the model's configuration."""

    def check(self, config: RunConfig, module: nn.Module) -> None:  # noqa: B027, not every task has something to check
        """Raise a `TesseraError` if this objective cannot train the model. `module`: unsharded, on the meta device."""

    def components(self, config: RunConfig, spec: ModelSpec) -> Mapping[str, Component]:
        """Return the frozen models that the task uses, by name. No checkpoint stores them.

        `replace(spec.main, trained=False)` is a second copy of the model with its initial weights.
        """
        return {}

    def setup(self, components: Mapping[str, FrozenModule], world: World) -> None:  # noqa: B027
        """Store the frozen models, which have their weights. A pipeline rank gets only the models of its stages."""

    @property
    def computed_shares(self) -> Mapping[str, float]:
        """Return module path -> fraction of its input that the module computes in a training step, to estimate costs.

        A module that is not listed computes all of its input.
        """
        return {}

    def compile(self) -> None:  # noqa: B027
        """Compile operations of the task. It is called if the run compiles blocks (`parallel.compile`)."""

    @property
    def reference(self) -> Reference | None:
        """Return how to use the trained model as a reference model; None if the task needs no reference."""
        return None

    def prepare(self, batch: Batch) -> Batch:
        """Return the batch with added tensors that the host computes while earlier steps run.

        The loader calls it for training batches before they are copied to the device, in its copying thread if it has
        one.
        """
        return batch

    @property
    def encode_steps(self) -> int:
        """Return how many training steps one call of `encode` covers; it runs before the first of them."""
        return 1

    def encode(self, batches: Sequence[Batch]) -> list[Batch]:
        """Return micro-batches with the outputs of frozen encoders. Runs on the device, without gradient.

        If components are on the first pipeline stage only, that stage runs it and sends the results to the others.
        Batches that are already encoded are returned unchanged.
        """
        return list(batches)

    @abstractmethod
    def counts(self, batch: Batch) -> Counts | None:
        """Return the counts of this micro-batch, before the model runs: how many tokens or samples each term sums over.

        Return None if the counts depend on the model's outputs. Then `losses` returns the counts, all terms must share
        one count, and gradients are divided by it after backward.
        """

    def inputs(self, batch: Batch) -> Batch:
        """Return the inputs of the model. Draw noise and compute targets here.

        It runs without gradient, and on every pipeline stage.
        """
        return batch

    def model_inputs(self, batch: Batch) -> Batch:
        """Return `inputs(batch)`. Its field `outputs` names all model outputs that the task reads."""
        return replace(self.inputs(batch), outputs=self.reads)

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """Return the model's outputs by name. A pipeline runs its stages instead and never calls this."""
        return model(batch)

    @abstractmethod
    def losses(self, outputs: Any, batch: Batch) -> Losses:
        """Return the loss terms and metrics of one micro-batch. `batch`: what `inputs` returned for it."""


@dataclass(frozen=True)
class SumSpec:
    """Describe a loss term or metric: its name, the name of its count, and its weight (None for a metric)."""

    name: str
    count: str
    weight: float | None = None


@dataclass(frozen=True)
class LossTotals:
    """Hold sums of terms and metrics over micro-batches and ranks, and the counts to divide them by, on the device."""

    specs: tuple[SumSpec, ...]
    sums: Tensor  # [specs]: one sum for each loss term and metric
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
        """Return the loss of an evaluation; raise if all counts are zero because all samples were masked."""
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
