"""Estimate the memory of a rank: its shards of parameters, and the bytes of these, of gradients, optimizer and buffers.

No process group is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from tessera.config.pattern import home
from tessera.core.model_plan import TensorStyle
from tessera.parallel.experts import ExpertPlan
from tessera.parallel.mesh import FSDP_EXPERTS, Axes
from tessera.parallel.pipeline_plan import PipelinePlan
from tessera.parallel.tensor import TensorPlan

BLOCKS_AT_ONCE = 2  # of those whose weights wait in host memory: the one in use and the next
# Name of a parameter, its bytes and its shape on a rank -> bytes of the optimizer's state.
StateBytes = Callable[[str, int, Sequence[int]], int]


def adamw_state(name: str, size: int, shape: Sequence[int] = ()) -> int:
    """Return the bytes of both moments, each of a parameter's own shape and type, and of one number of steps."""
    return 2 * size + 4


@dataclass(frozen=True)
class ParamShard:
    """Describe one parameter on one rank: the tensor that it computes with, and the ranks that share it."""

    name: str
    shape: tuple[int, ...]  # after the split over tp and ep, as it is gathered before use
    view: str  # the ranks that share it
    shared_by: int
    trained: bool
    whole: bool = False  # unsharded on every rank: an ignored module
    dim: int = 0  # of `shape`, that these ranks share

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Return the shape on the first rank that shares it, which has the most: shards are equal chunks."""
        if self.whole or not self.shape:  # a scalar is not sharded
            return self.shape
        chunk = -(-self.shape[self.dim] // self.shared_by)
        return (*self.shape[: self.dim], chunk, *self.shape[self.dim + 1 :])

    @property
    def local_numel(self) -> int:
        return prod(self.local_shape)


def shard_dimension(shape: Sequence[int], shared_by: int, split: Collection[int] = ()) -> int:
    """Return the dimension over which a shard group splits a parameter: the first, unless it is shorter than the group.

    That happens to stacked experts, where a rank would hold a full expert or nothing. Then it is a dimension that
    divides evenly (fully_shard demands it), if there is one, preferably not one that tp has `split` already.
    """
    if len(shape) < 3 or shape[0] >= shared_by:
        return 0
    even = [dim for dim in range(1, len(shape)) if shape[dim] and shape[dim] % shared_by == 0]
    return min(even, key=lambda dim: (dim in split, dim), default=0)


@dataclass(frozen=True)
class MemoryBytes:
    """Count the bytes on a rank."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: int = 0  # unsharded on every rank: quantized weights, tables
    window: int = 0  # of weights that wait in host memory, those of the two largest blocks in use
    host: int = 0  # all of these weights, in host memory

    @property
    def total(self) -> int:
        """Return the bytes on the device."""
        return self.parameters + self.gradients + self.optimizer + self.buffers + self.window


def param_shards(
    module: nn.Module,
    axes: Axes,
    *,
    tensor: TensorPlan | None,
    experts: ExpertPlan | None,
    frozen: Collection[str],
    ignored: Sequence[str],
    rows_only: bool = False,
) -> list[ParamShard]:
    """Return the shards of all parameters, in the model's order. `rows_only`: only first dimensions are split."""
    untrained = set(frozen)
    shards = []
    for name, parameter in module.named_parameters():
        in_experts = experts is not None and home(name, experts.modules) is not None
        view = FSDP_EXPERTS if in_experts else axes.fsdp_view(name)
        shape, split = list(parameter.shape), set()
        if in_experts and experts is not None:
            shape[0] //= experts.ep
        if tensor is not None:
            dim = _tensor_dimension(tensor.styles[name], shape)
            ranks = axes.size(axes.tensor_view(name))
            if dim is not None and ranks > 1:
                shape[dim] //= ranks
                split.add(dim)
        shared_by = axes.size(view)
        shards.append(
            ParamShard(
                name,
                tuple(shape),
                view,
                shared_by,
                trained=name not in untrained,
                whole=home(name, ignored) is not None,
                dim=0 if rows_only else shard_dimension(shape, shared_by, split),
            )
        )
    return shards


def _tensor_dimension(style: TensorStyle, shape: Sequence[int]) -> int | None:
    """Return the dimension that tp splits: of a weight [out, in], a bias [out], or experts with more in front: their
    number, and in an adapter that of the weights which share it."""
    if style in ("column", "vocab", "features"):
        return max(0, len(shape) - 2)
    if style == "row":
        return len(shape) - 1
    return None


def shards_of_stage(parts: Sequence[ParamShard], pipeline: PipelinePlan | None, position: int) -> list[ParamShard]:
    """Return the parameters at a position of the pipeline; a copied weight counts once for each stage that has it."""
    if pipeline is None:
        return list(parts)
    modules = _modules_at(pipeline, position)
    shards = [shard for shard in parts if home(shard.name, modules) is not None]
    if len(pipeline.stages) - 1 in pipeline.stages_of(position):
        shards += [shard for shard in parts if shard.name in pipeline.copies]
    return shards


def buffer_bytes(module: nn.Module, pipeline: PipelinePlan | None, position: int) -> int:
    """Return the bytes of buffers at a position of the pipeline. Buffers are unsharded, in their own type."""
    here = module.named_buffers()
    if pipeline is None:
        return sum(buffer.nbytes for _, buffer in here)
    modules = _modules_at(pipeline, position)
    return sum(buffer.nbytes for name, buffer in here if home(name, modules) is not None)


def blocks_of_stage(blocks: Sequence[str], pipeline: PipelinePlan | None, position: int) -> list[str]:
    """Return the blocks at a position of the pipeline."""
    if pipeline is None:
        return list(blocks)
    modules = _modules_at(pipeline, position)
    return [path for path in blocks if home(path, modules) is not None]


def _modules_at(pipeline: PipelinePlan, position: int) -> list[str]:
    return [path for stage in pipeline.stages_of(position) for path in pipeline.stages[stage].modules]


def memory_bytes(
    parts: Sequence[ParamShard],
    stored: torch.dtype,
    computed: torch.dtype,
    buffers: int = 0,
    state: StateBytes = adamw_state,
    waiting: Sequence[tuple[int, int]] = (),
    float32: Sequence[str] = (),
) -> MemoryBytes:
    """Return the bytes of fully sharded training.

    Ignored modules, which are frozen, have the type of computation, and those of `float32` this one.
    `waiting`: parameters and buffers in bytes of each block whose frozen weights are in host memory.
    """

    def type_of(shard: ParamShard) -> torch.dtype:
        if home(shard.name, float32) is not None:
            return torch.float32
        return computed if shard.whole and not shard.trained else stored

    sizes = [(shard.local_numel * type_of(shard).itemsize, shard) for shard in parts]
    trained = [(size, shard) for size, shard in sizes if shard.trained]
    optimizer = sum(state(shard.name, size, shard.local_shape) for size, shard in trained)
    away = [sum(block) for block in waiting]
    return MemoryBytes(
        sum(size for size, _ in sizes) - sum(size for size, _ in waiting),
        sum(size for size, _ in trained),
        optimizer,
        buffers - sum(size for _, size in waiting),
        window=sum(sorted(away)[-BLOCKS_AT_ONCE:]),
        host=sum(away),
    )
