"""Define the plan of a run: how a model is split over ranks, as frozen data without a process group.

`make_plan` makes it, and `plan_text` describes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import torch

from tessera.config.pattern import home
from tessera.parallel.communication import CommVolume, Kind
from tessera.parallel.context_parallel import ContextPlan
from tessera.parallel.device_fit import DeviceFit
from tessera.parallel.experts import ExpertPlan
from tessera.parallel.frozen import FrozenBytes
from tessera.parallel.memory_estimate import MemoryBytes, ParamShard
from tessera.parallel.mesh import DATA, REPLICATE, Axes
from tessera.parallel.modules import ModulePlan
from tessera.parallel.pipeline_plan import PipelinePlan
from tessera.parallel.sequence_sharding import BatchSharding
from tessera.parallel.tensor import TensorPlan

T = TypeVar("T")
Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class Workload:
    """Hold the batch sizes of a step that a plan depends on."""

    tokens: int = 0  # tokens of one micro-batch
    elements: Mapping[str, int] = field(default_factory=dict)  # encoder -> length of its input in a typical micro-batch
    rows: int = 1  # rows of one step, over all ranks
    rows_of_microbatch: int = 1

    def microbatches(self, axes: Axes) -> int:
        """Return the number of micro-batches of one rank in a step, rounded down, but at least 1.

        The loader refuses a remainder.
        """
        return max(1, self.rows // (self.rows_of_microbatch * axes.size(DATA)))


@dataclass(frozen=True)
class Sharding:
    """Hold the settings of FSDP."""

    active: bool  # whether FSDP is used
    reshard_after_forward: bool | int
    accumulate: Literal["reduce", "local"]
    prefetch_forward: int
    prefetch_backward: int
    offload: bool  # parameters, gradients and optimizer state are in host memory
    pin_memory: bool


@dataclass(frozen=True)
class Layout:
    """Hold how the model, its batches and its memory are split over ranks."""

    axes: Axes
    tensor: TensorPlan | None  # tensor parallelism
    context: ContextPlan | None  # context parallelism, and how inputs of encoders are distributed
    experts: ExpertPlan | None  # expert parallelism
    pipeline: PipelinePlan | None  # pipeline parallelism
    modules: ModulePlan  # modules that are FSDP groups, recomputed, offloaded or compiled
    sharding: Sharding

    @property
    def replicate(self) -> int:
        """Return the number of copies of the model."""
        return self.axes.size(REPLICATE)

    @property
    def batch_sharding(self) -> BatchSharding | None:
        """Return how micro-batches are split over ranks; None if every rank has full micro-batches."""
        return None if self.context is None else self.context.sharding

    def recomputes(self, path: str) -> bool:
        """Return whether a module is computed again in backward."""
        return home(path, (part.path for part in self.modules.recompute)) is not None

    def ahead(self, block: int, direction: Direction) -> list[str]:
        """Return the paths of the blocks that FSDP prefetches while the block with this index computes."""
        count = self.sharding.prefetch_forward if direction == "forward" else self.sharding.prefetch_backward
        return ahead(self.modules.blocks, block, count, direction)


@dataclass(frozen=True)
class Precision:
    """Hold the dtypes of the recipe section `precision`."""

    weights: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    output: torch.dtype | None
    cast_inputs: bool
    modules: Mapping[str, torch.dtype]  # modules that compute in another dtype
    float32: tuple[str, ...]  # modules with float32 weights in a model of another dtype


@dataclass(frozen=True)
class MemoryPlan:
    """Hold the memory of ranks in bytes, without activations."""

    by_position: tuple[MemoryBytes, ...]  # for each pipeline position, memory of the rank that needs most
    whole_gradients: int  # bytes of unsharded gradients with parallel.accumulate: local
    frozen: Mapping[str, FrozenBytes] = field(default_factory=dict)  # frozen component, such as "vae" -> its bytes
    # (number of steps whose batches are encoded together, bytes of the encoded tensors)
    encoded_ahead: tuple[int, int] | None = None

    @property
    def heaviest(self) -> MemoryBytes:
        return max(self.by_position, key=lambda memory: memory.total)


@dataclass(frozen=True, repr=False)
class Plan:
    layout: Layout
    precision: Precision
    memory: MemoryPlan
    workload: Workload
    rows: Mapping[str, int]  # module -> tokens or patches of a typical micro-batch on a rank; "": the decoder
    parameters: int  # number of parameters of the unsharded model
    trained: int
    param_shards: tuple[ParamShard, ...]  # all parameters
    device_fit: DeviceFit | None = None  # whether the memory fits into a device; only `tessera plan --device` sets it
    notes: tuple[str, ...] = ()  # lines to print after the plan

    def __repr__(self) -> str:
        ranks = self.layout.axes.world
        return f"Plan({ranks} ranks, {self.parameters:,} parameters, {self.trained:,} trained; describe() shows all)"

    @property
    def microbatches(self) -> int:
        """Return the number of micro-batches of one rank in a step."""
        return self.workload.microbatches(self.layout.axes)

    @property
    def frozen(self) -> tuple[str, ...]:
        """Return the parameters that are not trained."""
        return tuple(shard.name for shard in self.param_shards if not shard.trained)

    @property
    def float32_whole(self) -> tuple[str, ...]:
        """Return the float32 modules inside of blocks. They are not sharded: an FSDP group would break the graph of a
        compiled block."""
        return tuple(path for path in self.precision.float32 if home(path, self.layout.modules.blocks) is not None)

    def rows_at(self, path: str) -> int:
        """Return how many tokens or patches of a typical micro-batch a rank computes in a module."""
        return self.rows[self._part(path)]

    def gradient_reaches(self, path: str) -> bool:
        """Return whether backward reaches a module.

        It does if any parameter of the encoder or projector that contains the module is trained, or, for a module
        outside of these, if any parameter of the model is trained.
        """
        part = self._part(path)
        return any(shard.trained for shard in self.param_shards if not part or shard.name.startswith(part + "."))

    def volume(self, view: str, kind: Kind, passes: int, size: int) -> CommVolume:
        """Return the communication of a step with `passes` collectives of `size` bytes in each micro-batch."""
        count = passes * self.microbatches
        return CommVolume(self.layout.axes.label(view), kind, count, count * size)

    def _part(self, path: str) -> str:
        return home(path, filter(None, self.rows)) or ""

    def below(self, path: str) -> Plan:
        """Return the plan for the submodule at `path`: paths of blocks, recompute and dtypes are relative to it."""

        def inside(paths: Iterable[str]) -> dict[str, str]:
            """Map each full path that is inside of the submodule to its path relative to the submodule."""
            return {full: full.removeprefix(f"{path}.") for full in paths if full.startswith(f"{path}.")}

        modules, types = self.layout.modules, self.precision
        modules = replace(
            modules,
            blocks=tuple(inside(modules.blocks).values()),
            ignored=tuple(inside(modules.ignored).values()),
            recompute=tuple(replace(r, path=name) for r in modules.recompute for name in inside([r.path]).values()),
        )
        return replace(
            self,
            layout=replace(self.layout, modules=modules),
            precision=replace(
                types,
                modules={name: types.modules[full] for full, name in inside(types.modules).items()},
                float32=tuple(inside(types.float32).values()),
            ),
        )


@runtime_checkable
class ShardsItself(Protocol):
    """Declare a module that applies recompute, `fully_shard` and prefetch itself, if the plan uses FSDP."""

    def shard_itself(self, plan: Plan, arguments: dict[str, Any]) -> None:
        """Shard every trained parameter with torch's `fully_shard`. `arguments`: keywords of `fully_shard`."""
        ...


def ahead(modules: Sequence[T], at: int, count: int, direction: Direction) -> list[T]:
    """Return the `count` modules that run next after index `at`: the following ones, or in backward the previous."""
    if direction == "forward":
        return list(modules[at + 1 : at + 1 + count])
    return list(modules[max(0, at - count) : at])[::-1]
