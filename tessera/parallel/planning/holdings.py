"""What a rank will hold: the shape of its part of every parameter, and the bytes that these and its buffers make. Needs
no process group."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from tessera.core.pattern import home
from tessera.core.types import TensorStyle
from tessera.parallel.axes import COPY, COPY_EXPERTS, COPY_TOWER, TENSOR, TENSOR_TOWER, TP_REST, Axes
from tessera.parallel.planning.cut import PipelinePlan
from tessera.parallel.planning.experts import ExpertPlan
from tessera.parallel.planning.tensor import TensorPlan

ADAMW_STATES = 2  # exp_avg and exp_avg_sq, each of a parameter's own shape and type
ADAMW_STEP_BYTES = 4  # and one number that counts its steps


@dataclass(frozen=True)
class Piece:
    """One parameter as one rank has it: what it computes with, and which ranks share that."""

    name: str
    shape: tuple[int, ...]  # after cutting over tp and ep; what is gathered before it is used
    view: str  # the ranks that share it
    shared_by: int
    trained: bool
    whole: bool = False  # every rank keeps all of it: an ignored module
    dim: int = 0  # of `shape`, that these ranks share

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def held(self) -> int:
        """Numbers on the first of the ranks that share it, which has the most: shares are equal chunks."""
        if self.whole or not self.shape:  # nobody shares a single number
            return self.numel
        length = self.shape[self.dim]
        return -(-length // self.shared_by) * (self.numel // length) if length else 0


def shard_dimension(shape: Sequence[int], shared_by: int, cut: Collection[int] = ()) -> int:
    """The dimension of a parameter that the ranks of a shard group share: the first, unless there are more ranks than
    that is long. Stacked experts are: beyond their number a rank would hold a whole expert or nothing. Then it is one
    that divides evenly (fully_shard asks for that), if there is one, rather not one that tp has `cut` already."""
    if len(shape) < 3 or shape[0] >= shared_by:
        return 0
    even = [dim for dim in range(1, len(shape)) if shape[dim] and shape[dim] % shared_by == 0]
    return min(even, key=lambda dim: (dim in cut, dim), default=0)


@dataclass(frozen=True)
class Held:
    """Bytes on a rank."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: int = 0  # whole on every rank: weights in four bits, tables

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.buffers


def pieces(
    module: nn.Module,
    axes: Axes,
    *,
    tensor: TensorPlan | None,
    experts: ExpertPlan | None,
    frozen: Sequence[str],
    ignored: Sequence[str],
    rows_only: bool = False,
) -> list[Piece]:
    """Of the whole model, in its order. `rows_only`: nothing but first dimensions is shared (see `shard_dimension`)."""
    untrained = set(frozen)
    found = []
    for name, parameter in module.named_parameters():
        in_tower = tensor is not None and home(name, tensor.towers) is not None
        in_experts = experts is not None and home(name, experts.modules) is not None
        view = COPY_EXPERTS if in_experts else COPY_TOWER if in_tower and TP_REST in axes.root else COPY
        shape, cut = list(parameter.shape), set()
        if in_experts and experts is not None:
            shape[0] //= experts.ep
        if tensor is not None:
            style = tensor.styles[name]
            dim = _cut_dimension(style, shape)
            if dim is not None:
                parts = axes.size(TENSOR_TOWER if in_tower else TENSOR)
                shape[dim] //= parts
                cut |= {dim} if parts > 1 else set()
        shared_by = axes.size(view)
        found.append(
            Piece(
                name,
                tuple(shape),
                view,
                shared_by,
                trained=name not in untrained,
                whole=home(name, ignored) is not None,
                dim=0 if rows_only else shard_dimension(shape, shared_by, cut),
            )
        )
    return found


def _cut_dimension(style: TensorStyle, shape: Sequence[int]) -> int | None:
    """Of a linear layer's weight [out, in] or bias [out]; experts have a dimension more, in front."""
    if style in ("column", "vocab"):
        return 1 if len(shape) == 3 else 0
    if style == "row":
        return len(shape) - 1
    return None


def of_stage(parts: Sequence[Piece], pipeline: PipelinePlan | None, position: int) -> list[Piece]:
    """The pieces of a rank at this position of a pipeline; a copied table counts once for each stage that has it."""
    if pipeline is None:
        return list(parts)
    modules = _modules_at(pipeline, position)
    found = [piece for piece in parts if home(piece.name, modules) is not None]
    if len(pipeline.stages) - 1 in pipeline.stages_of(position):
        found += [piece for piece in parts if piece.name in pipeline.copies]
    return found


def buffer_bytes(module: nn.Module, pipeline: PipelinePlan | None, position: int) -> int:
    """Of a rank at this position: nobody shares or cuts buffers, and they keep the type that their author chose."""
    here = module.named_buffers()
    if pipeline is None:
        return sum(buffer.nbytes for _, buffer in here)
    modules = _modules_at(pipeline, position)
    return sum(buffer.nbytes for name, buffer in here if home(name, modules) is not None)


def _modules_at(pipeline: PipelinePlan, position: int) -> list[str]:
    return [path for stage in pipeline.stages_of(position) for path in pipeline.stages[stage].modules]


def held(parts: Sequence[Piece], kept: torch.dtype, computed: torch.dtype, buffers: int = 0) -> Held:
    """Of fully sharded training with AdamW. What is ignored is kept in the type that is computed with."""
    size = {piece.name: piece.held * (computed if piece.whole else kept).itemsize for piece in parts}
    parameters = sum(piece.held * (computed if piece.whole else kept).itemsize for piece in parts)
    trained = [piece for piece in parts if piece.trained]
    gradients = sum(size[piece.name] for piece in trained)
    return Held(parameters, gradients, ADAMW_STATES * gradients + ADAMW_STEP_BYTES * len(trained), buffers)
