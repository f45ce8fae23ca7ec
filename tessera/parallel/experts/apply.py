"""Experts dealt over ranks: each rank computes its own, tokens travel to them and back; and loads kept even over all.

With tp, each rank of a layer has a slice of the width of its experts. Of the rest of such a layer (router, shared
expert) nothing is said here. A module with stacked experts has a part `dispatch` without weights, which brings tokens
to them (`nn.moe.Dispatch`): that is what is exchanged.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from tessera.core.names import clean
from tessera.parallel.axes import CONTEXT, COPY, EP, REPLICATE, TENSOR
from tessera.parallel.experts.dispatch import RankDispatch
from tessera.parallel.mesh import Mesh
from tessera.parallel.planning.experts import ExpertPlan, Steered, is_steered, sums_rows
from tessera.parallel.wrapping import present


def apply_experts(module: nn.Module, plan: ExpertPlan, mesh: Mesh) -> None:
    """`module` may be a stage: what the plan names and the module lacks is passed over."""
    dealt, sliced = mesh.group(EP), mesh.group(TENSOR)
    if plan.ep > 1 or plan.tp > 1:
        ranks = _mesh(plan, mesh)
        for path in present(module, plan.stacks):
            experts = module.get_submodule(path)
            _cut(experts, plan, path, ranks)
            dispatch = experts.get_submodule("dispatch")
            experts.dispatch = RankDispatch(dispatch.implementation, dealt, sliced, plan.sequence)  # type: ignore[arg-type]
    for path in present(module, plan.row_sums):
        part = module.get_submodule(path)
        assert sums_rows(part)
        inside = plan.sequence and is_steered(part)
        groups = [mesh.group(CONTEXT), sliced if inside else None]
        part.row_total = RankRowTotal([group for group in groups if group is not None])
        if inside:
            assert sliced is not None
            part.part_total = RankRowTotal([sliced])  # type: ignore[attr-defined]
            module.get_submodule(path).register_forward_pre_hook(_OwnTokens(mesh.position(TENSOR), plan.tp))


def _mesh(plan: ExpertPlan, mesh: Mesh) -> DeviceMesh:
    """The ranks that have different parts of one layer's experts."""
    if plan.ep == 1 or plan.tp == 1:
        return mesh.view(EP if plan.tp == 1 else TENSOR)
    parts = mesh.axes.views[TENSOR]
    with warnings.catch_warnings():
        # As in `Mesh.copies`: an axis beside a joined one has no other public spelling yet.
        warnings.filterwarnings("ignore", message="Slicing a flattened dim")
        return mesh.root[EP, parts[0] if len(parts) == 1 else TENSOR]


def _cut(experts: nn.Module, plan: ExpertPlan, path: str, ranks: DeviceMesh) -> None:
    for name, parameter in list(experts.named_parameters(recurse=False)):
        placements = [Shard(0)] if plan.ep > 1 else []
        if plan.tp > 1:
            placements.append(Shard(plan.stacks[path][name]))
        # No rank speaks for the others: there is nothing to send yet, weights come later, to each its own.
        cut = distribute_tensor(parameter.detach(), ranks, placements, src_data_rank=None)
        setattr(experts, name, nn.Parameter(cut, requires_grad=parameter.requires_grad))


class RankRowTotal(nn.Module):
    """In the place of a total over a row that one rank has all of."""

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        super().__init__()
        self.groups = groups

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        total = x.clone()
        for group in self.groups:
            dist.all_reduce(total, group=group)
        return total


class _OwnTokens:
    """A hook: of what is known of every token, what belongs to this rank's part of them. That is the last argument of
    `Balance`, a dataclass with a number for each token in some of its fields and for each row in others."""

    def __init__(self, position: int, parts: int) -> None:
        self.position = position
        self.parts = parts

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        *others, rows = args
        own = {name: getattr(rows, name).chunk(self.parts)[self.position] for name in ("row", "counts")}
        return (*others, dataclasses.replace(rows, **own))


@dataclass(frozen=True)
class EvenLoads:
    """When a step ends: experts that got more tokens than the mean are chosen a little less from now on.

    All ranks of a layer take the same step, since all know the loads of all tokens.
    """

    groups: Sequence[dist.ProcessGroup]  # ranks with other tokens: the sum over all of them is over one after another
    parts: Sequence[Steered]

    @torch.no_grad()
    def sum(self) -> None:
        loads = [part.loads for part in self.parts if part.loads is not None]
        flat = torch.cat(loads)
        for group in self.groups:
            dist.all_reduce(flat, group=group)
        for part, load in zip(self.parts, flat.split([load.numel() for load in loads]), strict=True):
            assert part.bias is not None
            assert part.loads is not None
            part.bias += part.rate * (load.mean() - load).sign()
            part.loads.zero_()


def even_loads(module: nn.Module, plan: ExpertPlan, mesh: Mesh) -> list[EvenLoads]:
    """What an engine does with loads when a step ends. `module` may be the stages of a rank."""
    steered = set(plan.steered)
    parts = [part for name, part in module.named_modules() if clean(name) in steered and is_steered(part)]
    groups = [mesh.group(COPY), mesh.group(REPLICATE), mesh.group(TENSOR) if plan.sequence else None]
    return [EvenLoads([group for group in groups if group is not None], parts)] if parts else []
