"""Make the plan of a run from a recipe section and the model on the meta device.

The layout is checked here, so that an impossible one is refused on a laptop and not on a thousand devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from tessera.config.pattern import home, select, select_trees
from tessera.config.run_config import ParallelSection, PrecisionSection
from tessera.core.model_plan import ModelPlan
from tessera.errors import TesseraError
from tessera.parallel.block_offload import block_bytes
from tessera.parallel.context_parallel import plan_context
from tessera.parallel.experts import plan_experts
from tessera.parallel.memory_estimate import (
    StateBytes,
    adamw_state,
    blocks_of_stage,
    buffer_bytes,
    memory_bytes,
    param_shards,
    shards_of_stage,
)
from tessera.parallel.mesh import CONTEXT, Axes, divisors, make_axes
from tessera.parallel.modules import plan_modules
from tessera.parallel.pipeline_plan import plan_pipeline
from tessera.parallel.plan import Layout, MemoryPlan, Plan, Precision, Sharding, ShardsItself, Workload
from tessera.parallel.plan_text import DescribedPlan
from tessera.parallel.tensor import plan_tensor

DEFAULT_PRECISION = PrecisionSection()
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def parameter_bytes(plan: Plan) -> int:
    """Return the bytes of parameters on the rank that has most."""
    return max(memory.parameters for memory in plan.memory.by_position)


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
) -> DescribedPlan:
    """Return the plan of a run. `module`: may be on the meta device. `state`: computes the optimizer state in bytes."""
    axes = make_axes(section, model_plan, world)
    workload = workload or Workload()
    parameters = dict(module.named_parameters())
    frozen = _frozen_names(parameters, freeze)
    modules = plan_modules(section, model_plan, module, frozen)
    types = _precision(precision, model_plan, module)
    sharding = _sharding(section, axes, types)
    tensor = plan_tensor(section, model_plan, module, axes, workload.tokens)
    experts = plan_experts(section, model_plan, module, axes)
    pipeline = plan_pipeline(
        section, model_plan, module, axes, workload.microbatches(axes), workload.tokens, workload.rows_of_microbatch
    )
    shards = param_shards(
        module,
        axes,
        tensor=tensor,
        experts=experts,
        frozen=frozen,
        ignored=[*modules.ignored, *(path for path in types.float32 if home(path, modules.blocks) is not None)],
        # Only shards of the first dimension can be resharded over fewer ranks. `shard_itself` makes no others.
        rows_only=not isinstance(sharding.reshard_after_forward, bool) or isinstance(module, ShardsItself),
    )
    waiting = block_bytes(module, modules.block_offload, types.weights, types.float32, parameters=not sharding.active)
    _check_waiting(waiting, sharding.active)
    by_position = [shards_of_stage(shards, pipeline, position) for position in range(section.pp)]
    memory = [
        memory_bytes(
            here,
            types.weights,
            types.compute,
            buffer_bytes(module, pipeline, position),
            state,
            [waiting[path] for path in blocks_of_stage(modules.block_offload, pipeline, position)],
            types.float32,
        )
        for position, here in enumerate(by_position)
    ]
    gradients = max(sum(shard.numel for shard in here if shard.trained) for here in by_position)
    local = sharding.accumulate == "local" and world > 1
    context = plan_context(section, model_plan, module, axes, workload.tokens)
    return DescribedPlan(
        layout=Layout(axes, tensor, context, experts, pipeline, modules, sharding),
        precision=types,
        memory=MemoryPlan(tuple(memory), gradients * types.reduce.itemsize if local else 0),
        workload=workload,
        rows=_rows(model_plan, workload, axes),
        parameters=sum(p.numel() for p in parameters.values()),
        trained=sum(p.numel() for name, p in parameters.items() if name not in frozen),
        param_shards=tuple(shards),
    )


def _frozen_names(parameters: Mapping[str, nn.Parameter], freeze: Sequence[str]) -> set[str]:
    """Return the parameters that are not trained."""
    frozen = set(select_trees(freeze, parameters, "model.freeze") if freeze else [])
    frozen |= {name for name, parameter in parameters.items() if not parameter.requires_grad}
    if len(frozen) == len(parameters):
        raise TesseraError(
            "all parameters are frozen, so there is nothing to train", where="model.freeze", code="model.all-frozen"
        )
    return frozen


def _precision(section: PrecisionSection, model_plan: ModelPlan, module: nn.Module) -> Precision:
    weights, compute = DTYPES[section.weights], DTYPES[section.resolved(accelerator=False).compute]
    paths = [path for path, _ in module.named_modules() if path]
    float32: tuple[str, ...] = ()
    if model_plan.float32 and {weights, compute} != {torch.float32}:
        float32 = tuple(select(model_plan.float32, paths, "float32"))
    return Precision(
        weights=weights,
        compute=compute,
        reduce=DTYPES[section.reduce],
        output=DTYPES[section.output] if section.output else None,
        cast_inputs=section.cast_inputs,
        modules={  # the last matching pattern counts
            path: DTYPES[dtype]
            for pattern, dtype in section.modules.items()
            for path in select([pattern], paths, "precision.modules")
        },
        float32=float32,
    )


def _sharding(section: ParallelSection, axes: Axes, types: Precision) -> Sharding:
    together = section.pp > 1 or section.backend == "megatron"
    reshard = section.reshard_after_forward if section.reshard_after_forward is not None else not together
    _check_reshard(reshard, axes.size("fsdp"))
    # On one rank FSDP is used only for master weights, casts or CPU offload.
    casts = types.compute != types.weights or types.output is not None or types.cast_inputs or bool(types.modules)
    return Sharding(
        active=axes.world > 1 or casts or section.offload,
        reshard_after_forward=reshard,
        accumulate=section.accumulate or ("local" if together else "reduce"),
        prefetch_forward=section.prefetch_forward,
        prefetch_backward=section.prefetch_backward,
        offload=section.offload,
        pin_memory=section.pin_memory,
    )


def _check_waiting(waiting: Mapping[str, tuple[int, int]], sharded: bool) -> None:
    """Raise if a block in `parallel.block_offload` has no frozen weights, or FSDP shards them.

    `waiting`: by block, bytes of its parameters and of its buffers that are kept in host memory.
    """
    for path, sizes in waiting.items():
        if not sum(sizes):
            why = "FSDP shards or casts its weights" if sharded else "they are trained"
            raise TesseraError(
                f"{path} has no weights to offload: {why}",
                where="parallel.block_offload",
                fix="set model.lora.quantize: nf4, whose weights FSDP does not shard; or on one rank "
                "precision.weights: bfloat16"
                if sharded
                else "set model.lora or model.freeze, or leave parallel.block_offload out",
                code="layout.no-frozen-weights",
            )


def _check_reshard(again: bool | int, shard: int) -> None:
    if not isinstance(again, bool) and not (1 < again < shard and shard % again == 0):
        raise TesseraError(
            f"parallel.reshard_after_forward={again} is not a divisor, above 1 and below {shard}, of the {shard} "
            "ranks that share a copy of the model",
            where="parallel.reshard_after_forward",
            allowed=["true", "false", *divisors(shard)[1:-1]],
            code="layout.reshard-size",
        )


def _rows(model_plan: ModelPlan, workload: Workload, axes: Axes) -> dict[str, int]:
    """Return for each module path the number of tokens or encoder inputs that a rank computes; "" is the decoder.

    On every rank, a projector gets the encoder outputs of all ranks.
    """
    rows = {"": workload.tokens // axes.size(CONTEXT)}
    for name, stream in model_plan.streams.items():
        elements = workload.elements.get(name, 0)
        if stream.projector:
            rows[stream.projector] = elements // stream.per_slot
        if stream.module:
            split = axes.encoders.get(stream.module)
            shared = axes.size(CONTEXT) if stream.read_at else 1
            rows[stream.module] = elements // (shared if split is None else axes.size(split.dp))
    return rows
