"""The resolved answer to "how is this model dealt out": frozen, printable, and made without any process group.

All validation is here and in `planning`, so that what cannot work is refused on a laptop and not on a thousand
devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from tessera.core.errors import TesseraError
from tessera.core.pattern import home, select_trees
from tessera.core.run_config import ParallelSection
from tessera.core.types import ModelPlan
from tessera.parallel.axes import CONTEXT, DEAL, REPLICATE, Axes, divisors, make_axes
from tessera.parallel.planning.context import ContextPlan, plan_context
from tessera.parallel.planning.cut import PipelinePlan, plan_cut
from tessera.parallel.planning.experts import ExpertPlan, plan_experts
from tessera.parallel.planning.holdings import Held, Piece, buffer_bytes, held, of_stage, pieces
from tessera.parallel.planning.modules import Keep, Recompute, resolve_roles
from tessera.parallel.planning.tensor import TensorPlan, plan_tensor

__all__ = ["DTYPES", "Keep", "Plan", "Recompute", "Workload", "ahead", "make_plan"]

T = TypeVar("T")
Direction = Literal["forward", "backward"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Workload:
    """What a step asks of the ranks, as far as a plan depends on it."""

    tokens: int = 0  # of one micro-batch
    tower_rows: int = 0  # patches of a typical one
    rows: int = 1  # of one step, over all ranks
    rows_of_microbatch: int = 1


@dataclass(frozen=True)
class Plan:
    axes: Axes
    tensor: TensorPlan | None  # how layers are computed by several ranks
    context: ContextPlan | None  # how rows and pictures are shared by several ranks
    experts: ExpertPlan | None  # how experts are dealt
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
    swap: tuple[str, ...]  # modules whose activations wait in host memory
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
    reshard_after_forward: bool | int
    parameters: int  # of the whole model
    trained: int
    pieces: tuple[Piece, ...] = field(repr=False)  # every parameter, as the rank that has it computes with it
    held: tuple[Held, ...]  # by position in the pipeline, on the rank there that has the most
    whole_gradient_bytes: int  # on top of these while micro-batches accumulate locally

    @property
    def heaviest(self) -> Held:
        return max(self.held, key=lambda held: held.total)

    def describe(self) -> str:
        """For people: what `tessera plan` prints."""
        from tessera.parallel.planning.text import plan_text  # it speaks of plans, so it comes after this file

        return plan_text(self)

    def figures(self) -> dict[str, Any]:
        """For programs: what `tessera plan --json` writes."""
        from tessera.parallel.planning.figures import plan_figures  # as above

        return plan_figures(self)

    def rows_at(self, path: str) -> int:
        """That a rank computes in a module, in a typical micro-batch."""
        return self.rows[self._part(path)]

    def gradient_reaches(self, path: str) -> bool:
        """Whether something is trained in the tower of a module, or before it: then backward passes through there."""
        part = self._part(path)
        return any(piece.trained for piece in self.pieces if not part or piece.name.startswith(part + "."))

    def _part(self, path: str) -> str:
        return home(path, filter(None, self.rows)) or ""

    def ahead(self, block: int, direction: Direction) -> list[str]:
        """The blocks that block number `block` has gathered before their turn."""
        count = self.prefetch_forward if direction == "forward" else self.prefetch_backward
        return ahead(self.blocks, block, count, direction)


def ahead(chain: Sequence[T], at: int, count: int, direction: Direction) -> list[T]:
    """The next `count` members of a chain that is in order of execution, nearest first."""
    if direction == "forward":
        return list(chain[at + 1 : at + 1 + count])
    return list(chain[max(0, at - count) : at])[::-1]


def make_plan(
    section: ParallelSection,
    model_plan: ModelPlan,
    module: nn.Module,
    world: int,
    *,
    storage_dtype: str = "float32",
    freeze: Sequence[str] = (),
    workload: Workload | None = None,
) -> Plan:
    """`module` is only looked at (names and shapes): one on the meta device serves."""
    axes = make_axes(section, model_plan, world)
    workload = workload or Workload()
    shard = axes.size("copy")
    together = section.pp > 1 or section.backend == "megatron"
    reshard = section.reshard_after_forward if section.reshard_after_forward is not None else not together
    _check_reshard(reshard, shard)
    accumulate = section.accumulate or ("local" if together else "reduce")
    parameters = dict(module.named_parameters())
    asked = select_trees(freeze, parameters, "model.freeze") if freeze else []
    frozen = [name for name, p in parameters.items() if name in set(asked) or not p.requires_grad]
    if len(frozen) == len(parameters):
        raise TesseraError("every parameter is frozen: there is nothing to train", where="model.freeze")
    roles = resolve_roles(section, model_plan, module, set(frozen))
    kept = DTYPES[storage_dtype]
    computed = DTYPES[section.param_dtype] if section.param_dtype else kept
    # One rank gains nothing from fully_shard, unless it keeps master weights, casts or moves parameters to the host.
    casts = computed != kept or section.output_dtype is not None or section.cast_forward_inputs
    tensor = plan_tensor(section, model_plan, module, axes, workload.tokens)
    experts = plan_experts(section, model_plan, module, axes)
    pipeline = plan_cut(
        section,
        model_plan,
        module,
        axes,
        _microbatches(workload, axes),
        workload.tokens,
        workload.rows_of_microbatch,
    )
    parts = pieces(
        module,
        axes,
        tensor=tensor,
        experts=experts,
        frozen=frozen,
        ignored=roles.ignored,
        # Torch cannot keep other shares gathered by fewer ranks; and what a class does itself is its own affair.
        rows_only=not isinstance(reshard, bool) or hasattr(module, "_fully_shard"),
    )
    by_position = [of_stage(parts, pipeline, position) for position in range(section.pp)]
    reduced = DTYPES[section.reduce_dtype]
    whole_gradients = max(sum(piece.numel for piece in here if piece.trained) for here in by_position)
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
        sharded=world > 1 or casts or section.offload,
        blocks=roles.blocks,
        ignored=roles.ignored,
        recompute=roles.recompute,
        use_reentrant=section.use_reentrant,
        swap=roles.swap,
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
        output_dtype=DTYPES[section.output_dtype] if section.output_dtype else None,
        cast_forward_inputs=section.cast_forward_inputs,
        reshard_after_forward=reshard,
        parameters=sum(p.numel() for p in parameters.values()),
        trained=sum(p.numel() for name, p in parameters.items() if name not in set(frozen)),
        pieces=tuple(parts),
        held=tuple(
            held(here, kept, computed, buffer_bytes(module, pipeline, position))
            for position, here in enumerate(by_position)
        ),
        whole_gradient_bytes=whole_gradients * reduced.itemsize if accumulate == "local" and world > 1 else 0,
    )


def _check_reshard(again: bool | int, shard: int) -> None:
    if not isinstance(again, bool) and not (1 < again < shard and shard % again == 0):
        raise TesseraError(
            f"parallel.reshard_after_forward={again} is no part of the {shard} ranks that share one copy",
            where="parallel.reshard_after_forward",
            allowed=["true", "false", *divisors(shard)[1:-1]],
        )


def _rows(model_plan: ModelPlan, workload: Workload, axes: Axes) -> dict[str, int]:
    """Pictures are dealt among ranks, and what joins their patches into tokens sees those of all."""
    found = {"": workload.tokens // axes.size(CONTEXT)}
    joined = [link.carry.rows_per_token for link in model_plan.stages if link.tower in model_plan.towers and link.carry]
    for path in model_plan.idle_groups:
        found[path] = workload.tower_rows // max(joined, default=1)
    for path in model_plan.towers.values():
        found[path] = workload.tower_rows // axes.size(DEAL)
    return found


def _microbatches(workload: Workload, axes: Axes) -> int:
    """Of one rank in a step. What does not divide is the loader's to refuse."""
    return max(1, workload.rows // (workload.rows_of_microbatch * axes.size("data")))
