"""Estimate the memory of a rank: shards of parameters, gradients, optimizer state and buffers, in bytes.

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

BLOCKS_AT_ONCE = 2  # offloaded blocks that are on the device at a time: the current one and the next
# (name of a parameter, its bytes on a rank, its shape on a rank) -> bytes of its optimizer state on that rank.
StateBytes = Callable[[str, int, Sequence[int]], int]


def adamw_state(name: str, size: int, shape: Sequence[int] = ()) -> int:
    """Return the bytes of AdamW's state for a parameter of `size` bytes: two moments of that size, and a step count."""
    return 2 * size + 4


@dataclass(frozen=True)
class ParamShard:
    """Describe a parameter: its shape on a rank, and the ranks over which it is sharded."""

    name: str
    shape: tuple[int, ...]  # shape after the split by tp and ep, before FSDP shards it
    view: str  # mesh view over which FSDP shards it
    shared_by: int
    trained: bool
    whole: bool = False  # whether FSDP does not shard it
    dim: int = 0  # dimension that FSDP shards

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Return the shape of the first shard, which is the largest."""
        if self.whole or not self.shape:  # a scalar is not sharded
            return self.shape
        chunk = -(-self.shape[self.dim] // self.shared_by)
        return (*self.shape[: self.dim], chunk, *self.shape[self.dim + 1 :])

    @property
    def local_numel(self) -> int:
        return prod(self.local_shape)


def shard_dimension(shape: Sequence[int], shared_by: int, split: Collection[int] = ()) -> int:
    """Return the dimension in which FSDP shards a parameter: mostly the first.

    Stacked experts may be fewer than the ranks. Then it is a dimension that the ranks divide evenly, as FSDP requires,
    if there is one. Dimensions in `split`, which tp splits already, are chosen last.
    """
    if len(shape) < 3 or shape[0] >= shared_by:
        return 0
    even = [dim for dim in range(1, len(shape)) if shape[dim] and shape[dim] % shared_by == 0]
    return min(even, key=lambda dim: (dim in split, dim), default=0)


@dataclass(frozen=True)
class MemoryBytes:
    """Hold the bytes that training needs on a rank, without activations."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: int = 0  # quantized weights, tables and other buffers: they are not sharded
    window: int = 0  # device memory for the two largest offloaded blocks
    host: int = 0  # offloaded weights in host memory

    @property
    def total(self) -> int:
        """Return the bytes on the device; with `parallel.offload`, most of them are in host memory."""
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
    """Return the shards of all parameters, in the model's order. `rows_only`: FSDP shards only the first dimension."""
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
    """Return the dimension that tp splits, for a weight [..., out, in] or a bias [out]; None if it is not split."""
    if style in ("column", "vocab", "features"):
        return max(0, len(shape) - 2)
    if style == "row":
        return len(shape) - 1
    return None


def shards_of_stage(parts: Sequence[ParamShard], pipeline: PipelinePlan | None, position: int) -> list[ParamShard]:
    """Return the parameters of all stages that one pipeline rank, `position`, holds, with copies of tied weights."""
    if pipeline is None:
        return list(parts)
    modules = _modules_at(pipeline, position)
    shards = [shard for shard in parts if home(shard.name, modules) is not None]
    if len(pipeline.stages) - 1 in pipeline.stages_of(position):
        shards += [shard for shard in parts if shard.name in pipeline.copies]
    return shards


def buffer_bytes(module: nn.Module, pipeline: PipelinePlan | None, position: int) -> int:
    """Return the bytes of buffers that one pipeline rank, `position`, holds."""
    here = module.named_buffers()
    if pipeline is None:
        return sum(buffer.nbytes for _, buffer in here)
    modules = _modules_at(pipeline, position)
    return sum(buffer.nbytes for name, buffer in here if home(name, modules) is not None)


def blocks_of_stage(blocks: Sequence[str], pipeline: PipelinePlan | None, position: int) -> list[str]:
    """Return the blocks of all stages that one pipeline rank, `position`, holds."""
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
    """Return the memory of a rank. `stored`: dtype of parameters. `computed`: dtype of computation.

    Modules in `parallel.ignore`, which are frozen, are stored in `computed`. `float32`: modules stored in float32.
    `waiting`: (bytes of parameters, bytes of buffers) of each offloaded block.
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
