"""The resolved answer to how a model is split over ranks: frozen, printable, and made without any process group.

Everything is validated while the plan is made, so that what cannot work is refused on a laptop and not on a thousand
devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from tessera.config.pattern import home, select, select_trees
from tessera.config.run_config import ParallelSection, PrecisionSection
from tessera.core.model_plan import ModelPlan
from tessera.errors import TesseraError
from tessera.parallel.block_offload import block_bytes
from tessera.parallel.communication import CommVolume, Kind
from tessera.parallel.context_parallel import ContextPlan, plan_context
from tessera.parallel.device_fit import DeviceFit
from tessera.parallel.experts import ExpertPlan, plan_experts
from tessera.parallel.frozen import FrozenBytes
from tessera.parallel.memory_estimate import (
    MemoryBytes,
    ParamShard,
    StateBytes,
    adamw_state,
    blocks_of_stage,
    buffer_bytes,
    memory_bytes,
    param_shards,
    shards_of_stage,
)
from tessera.parallel.mesh import CONTEXT, REPLICATE, Axes, divisors, make_axes
from tessera.parallel.modules import Keep, Recompute, ShardsItself, plan_modules
from tessera.parallel.pipeline_plan import PipelinePlan, plan_pipeline
from tessera.parallel.sequence_sharding import BatchSharding
from tessera.parallel.tensor import TensorPlan, plan_tensor

__all__ = ["DTYPES", "Keep", "Plan", "Recompute", "Workload", "ahead", "make_plan"]

T = TypeVar("T")
Direction = Literal["forward", "backward"]
DEFAULT_PRECISION = PrecisionSection()
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Workload:
    """Describe the work of a step, as far as a plan depends on it."""

    tokens: int = 0  # of one micro-batch
    elements: Mapping[str, int] = field(default_factory=dict)  # of a typical one, by encoder
    rows: int = 1  # of one step, over all ranks
    rows_of_microbatch: int = 1


@dataclass(frozen=True)
class Plan:
    axes: Axes
    tensor: TensorPlan | None  # how layers are computed by several ranks
    context: ContextPlan | None  # how sequences, and the input of encoders, are split over ranks
    experts: ExpertPlan | None  # how experts are distributed
    pipeline: PipelinePlan | None  # how layers lie one after another on several ranks
    workload: Workload
    rows: Mapping[str, int]  # module -> rows that a rank computes there in a typical micro-batch; "": of tokens
    microbatches: int  # of one rank in a step
    world: int
    replicate: int  # copies of the model
    shard: int  # ranks that share one copy
    sharded: bool  # whether fully_shard runs at all
    blocks: tuple[str, ...]  # modules that are gathered and freed as one, in order of execution
    ignored: tuple[str, ...]  # modules that every rank keeps whole
    recompute: tuple[Recompute, ...]  # modules whose activations are recomputed in backward
    use_reentrant: bool
    activation_offload: tuple[str, ...]  # modules whose activations wait in host memory
    block_offload: tuple[str, ...]  # modules whose frozen weights wait in host memory
    compiled: tuple[str, ...]
    offload: bool  # parameters, gradients and optimizer state live in host memory
    pin_memory: bool
    prefetch_forward: int
    prefetch_backward: int
    accumulate: Literal["reduce", "local"]
    frozen: tuple[str, ...]  # parameters that are not trained
    storage_dtype: torch.dtype
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    output_dtype: torch.dtype | None
    cast_forward_inputs: bool
    module_dtypes: Mapping[str, torch.dtype]  # modules that compute in another type than the rest
    float32: tuple[str, ...]  # modules whose weights stay in float32 where the rest is computed in another type
    reshard_after_forward: bool | int
    parameters: int  # of the whole model
    trained: int
    param_shards: tuple[ParamShard, ...] = field(
        repr=False
    )  # every parameter, as the rank that has it computes with it
    memory: tuple[MemoryBytes, ...]  # by position in the pipeline, on the rank there that has the most
    whole_gradient_bytes: int  # on top of these while micro-batches accumulate locally
    frozen_components: Mapping[str, FrozenBytes] = field(default_factory=dict)  # on the rank that holds most
    encoded_ahead: tuple[int, int] | None = None  # steps that are encoded together, and bytes of what waits for them
    device_fit: DeviceFit | None = None  # where a device was named
    notes: tuple[str, ...] = ()  # what a reader should know besides

    @property
    def batch_sharding(self) -> BatchSharding | None:
        """Return how micro-batches are split over ranks; None where every rank has whole ones."""
        return None if self.context is None else self.context.sharding

    @property
    def float32_whole(self) -> tuple[str, ...]:
        """Return those of them inside of blocks. A shard group there would tear a compiled block apart, so every rank
        keeps them whole."""
        return tuple(path for path in self.float32 if home(path, self.blocks) is not None)

    @property
    def heaviest(self) -> MemoryBytes:
        return max(self.memory, key=lambda memory: memory.total)

    def describe(self) -> str:
        """Return the plan in words, as `tessera plan` prints it."""
        from tessera.parallel.plan_text import plan_text  # imports this file

        return plan_text(self)

    def modules(self) -> str:
        """Return the modules that hold weights by name, one line for those of all layers, as `tessera plan --modules`
        prints them. Keys that choose modules, such as `model.lora.targets`, take these names."""
        from tessera.parallel.plan_text import modules_text  # as above

        return modules_text(self)

    def __repr__(self) -> str:
        return (
            f"Plan({self.world} ranks, {self.parameters:,} parameters, {self.trained:,} trained; describe() says all)"
        )

    def _repr_html_(self) -> str:
        from tessera.parallel.plan_text import plan_table  # as above

        return plan_table(self)

    def figures(self) -> dict[str, Any]:
        """Return the plan in numbers, as `tessera plan --json` writes it."""
        from tessera.parallel.plan_text import plan_figures  # as above

        return plan_figures(self)

    def rows_at(self, path: str) -> int:
        """Return the elements that a rank computes in a module, in a typical micro-batch."""
        return self.rows[self._part(path)]

    def gradient_reaches(self, path: str) -> bool:
        """Return whether backward reaches a module: whether its encoder, or the model where it is in none, is
        trained."""
        part = self._part(path)
        return any(shard.trained for shard in self.param_shards if not part or shard.name.startswith(part + "."))

    def recomputes(self, path: str) -> bool:
        """Return whether a module is computed again in backward."""
        return home(path, (part.path for part in self.recompute)) is not None

    def volume(self, view: str, kind: Kind, passes: int, size: int) -> CommVolume:
        """Return the communication of so many collectives of one size in each micro-batch."""
        count = passes * self.microbatches
        return CommVolume(self.axes.label(view), kind, count, count * size)

    def _part(self, path: str) -> str:
        return home(path, filter(None, self.rows)) or ""

    def below(self, path: str) -> Plan:
        """Return the plan for a submodule, whose own names begin where `path` ends."""

        def inside(paths: Iterable[str]) -> dict[str, str]:
            """Return the paths inside of the submodule -> its own names for them."""
            return {one: one.removeprefix(f"{path}.") for one in paths if one.startswith(f"{path}.")}

        return replace(
            self,
            blocks=tuple(inside(self.blocks).values()),
            ignored=tuple(inside(self.ignored).values()),
            recompute=tuple(replace(one, path=own) for one in self.recompute for own in inside([one.path]).values()),
            module_dtypes={own: self.module_dtypes[one] for one, own in inside(self.module_dtypes).items()},
            float32=tuple(inside(self.float32).values()),
        )

    def ahead(self, block: int, direction: Direction) -> list[str]:
        """Return the blocks that block number `block` prefetches."""
        count = self.prefetch_forward if direction == "forward" else self.prefetch_backward
        return ahead(self.blocks, block, count, direction)


def _dtypes_of_modules(precision: PrecisionSection, module: nn.Module) -> dict[str, torch.dtype]:
    """Return the modules that `precision.modules` names, each with its type; of two patterns the later one counts."""
    paths = [path for path, _ in module.named_modules() if path]
    found: dict[str, torch.dtype] = {}
    for pattern, dtype in precision.modules.items():
        for path in select([pattern], paths, "precision.modules"):
            found[path] = DTYPES[dtype]
    return found


def parameter_bytes(plan: Plan) -> int:
    """Return the bytes of parameters that a rank holds at most, between uses."""
    return max(here.parameters for here in plan.memory)


def ahead(modules: Sequence[T], at: int, count: int, direction: Direction) -> list[T]:
    """Return the next `count` members of a list in order of execution, nearest first."""
    if direction == "forward":
        return list(modules[at + 1 : at + 1 + count])
    return list(modules[max(0, at - count) : at])[::-1]


def make_plan(
    section: ParallelSection,
    model_plan: ModelPlan,
    module: nn.Module,
    world: int,
    *,
    precision: PrecisionSection = DEFAULT_PRECISION,
    freeze: Sequence[str] = (),
    workload: Workload | None = None,
    state: StateBytes = adamw_state,
) -> Plan:
    """Return the plan of a run. Of `module` only names and shapes are read, so it may be on the meta device. `state`:
    what the optimizer keeps of each parameter."""
    axes = make_axes(section, model_plan, world)
    workload = workload or Workload()
    shard = axes.size("fsdp")
    together = section.pp > 1 or section.backend == "megatron"
    reshard = section.reshard_after_forward if section.reshard_after_forward is not None else not together
    _check_reshard(reshard, shard)
    accumulate = section.accumulate or ("local" if together else "reduce")
    parameters = dict(module.named_parameters())
    asked = select_trees(freeze, parameters, "model.freeze") if freeze else []
    frozen = [name for name, p in parameters.items() if name in set(asked) or not p.requires_grad]
    if len(frozen) == len(parameters):
        raise TesseraError("every parameter is frozen: there is nothing to train", where="model.freeze")
    roles = plan_modules(section, model_plan, module, set(frozen))
    kept, computed = DTYPES[precision.weights], DTYPES[precision.resolved(accelerator=False).compute]
    others = _dtypes_of_modules(precision, module)
    wide: tuple[str, ...] = ()
    if model_plan.float32 and {kept, computed} != {torch.float32}:
        wide = tuple(select(model_plan.float32, [path for path, _ in module.named_modules() if path], "float32"))
    # One rank gains nothing from fully_shard, unless it keeps master weights, casts or moves parameters to the host.
    casts = computed != kept or precision.output is not None or precision.cast_inputs or bool(others)
    tensor = plan_tensor(section, model_plan, module, axes, workload.tokens)
    experts = plan_experts(section, model_plan, module, axes)
    pipeline = plan_pipeline(
        section,
        model_plan,
        module,
        axes,
        _microbatches(workload, axes),
        workload.tokens,
        workload.rows_of_microbatch,
    )
    parts = param_shards(
        module,
        axes,
        tensor=tensor,
        experts=experts,
        frozen=frozen,
        ignored=[*roles.ignored, *(path for path in wide if home(path, roles.blocks) is not None)],
        # Torch cannot keep other shares gathered by fewer ranks; and what a class does itself is its own affair.
        rows_only=not isinstance(reshard, bool) or isinstance(module, ShardsItself),
    )
    sharded = world > 1 or casts or section.offload
    waiting = block_bytes(module, roles.block_offload, kept, wide, parameters=not sharded)
    _check_waiting(waiting, sharded)
    by_position = [shards_of_stage(parts, pipeline, position) for position in range(section.pp)]
    reduced = DTYPES[precision.reduce]
    whole_gradients = max(sum(shard.numel for shard in here if shard.trained) for here in by_position)
    return Plan(
        axes=axes,
        tensor=tensor,
        context=plan_context(section, model_plan, module, axes, workload.tokens),
        experts=experts,
        pipeline=pipeline,
        workload=workload,
        rows=_rows(model_plan, workload, axes),
        microbatches=_microbatches(workload, axes),
        world=world,
        replicate=axes.size(REPLICATE),
        shard=shard,
        sharded=sharded,
        blocks=roles.blocks,
        ignored=roles.ignored,
        recompute=roles.recompute,
        use_reentrant=section.use_reentrant,
        activation_offload=roles.activation_offload,
        block_offload=roles.block_offload,
        compiled=roles.compiled,
        offload=section.offload,
        pin_memory=section.pin_memory,
        prefetch_forward=section.prefetch_forward,
        prefetch_backward=section.prefetch_backward,
        accumulate=accumulate,
        frozen=tuple(frozen),
        storage_dtype=kept,
        param_dtype=computed,
        reduce_dtype=reduced,
        output_dtype=DTYPES[precision.output] if precision.output else None,
        cast_forward_inputs=precision.cast_inputs,
        module_dtypes=others,
        float32=wide,
        reshard_after_forward=reshard,
        parameters=sum(p.numel() for p in parameters.values()),
        trained=sum(p.numel() for name, p in parameters.items() if name not in set(frozen)),
        param_shards=tuple(parts),
        memory=tuple(
            memory_bytes(
                here,
                kept,
                computed,
                buffer_bytes(module, pipeline, position),
                state,
                [waiting[path] for path in blocks_of_stage(roles.block_offload, pipeline, position)],
                wide,
            )
            for position, here in enumerate(by_position)
        ),
        whole_gradient_bytes=whole_gradients * reduced.itemsize if accumulate == "local" and world > 1 else 0,
    )


def _check_waiting(waiting: Mapping[str, tuple[int, int]], sharded: bool) -> None:
    """Raise if blocks have no frozen weights that a rank has whole."""
    for path, sizes in waiting.items():
        if not sum(sizes):
            why = "shared by ranks, or cast for computing" if sharded else "trained"
            raise TesseraError(
                f"{path} has no frozen weights that could wait in host memory: they are {why}",
                where="parallel.block_offload",
                fix="model.lora with quantize: nf4 keeps them whole in four bits; on one rank, so does "
                "precision.weights: bfloat16 without it"
                if sharded
                else "it is for adapters (model.lora) and frozen blocks (model.freeze)",
            )


def _check_reshard(again: bool | int, shard: int) -> None:
    if not isinstance(again, bool) and not (1 < again < shard and shard % again == 0):
        raise TesseraError(
            f"parallel.reshard_after_forward={again} is no part of the {shard} ranks that share one copy",
            where="parallel.reshard_after_forward",
            allowed=["true", "false", *divisors(shard)[1:-1]],
        )


def _rows(model_plan: ModelPlan, workload: Workload, axes: Axes) -> dict[str, int]:
    """Return the elements that a rank computes in a module. A projector sees the outputs of all ranks."""
    found = {"": workload.tokens // axes.size(CONTEXT)}
    for name, stream in model_plan.encoders.items():
        elements = workload.elements.get(name, 0)
        if stream.projector:
            found[stream.projector] = elements // stream.per_slot
        found[stream.module] = elements // axes.size(axes.encoders[stream.module].dp)
    return found


def _microbatches(workload: Workload, axes: Axes) -> int:
    """Return the micro-batches of one rank in a step. The loader refuses numbers that do not divide."""
    return max(1, workload.rows // (workload.rows_of_microbatch * axes.size("data")))
