"""Expert parallelism: experts are distributed over ranks, and tokens are sent to them and back.

With tp, each rank has a slice of the width of each expert. The child `dispatch` of a module with stacked experts, which
sends tokens to experts (`nn.moe.Dispatch`), is replaced.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import gcd
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from tessera.config.pattern import matches, select
from tessera.config.run_config import ParallelSection
from tessera.core.model_plan import ModelPlan
from tessera.errors import TesseraError
from tessera.lora.select import is_factor
from tessera.ops.moe import (
    NO_ADAPTERS,
    ExpertAdapters,
    ExpertOrder,
    collect_rows,
    expert_mlp,
    spread_rows,
    weigh_choices,
)
from tessera.parallel.collectives import all_to_all, as_it_is, gathered, scattered, summed, with_backward
from tessera.parallel.mesh import CONTEXT, EP, SHARD, TENSOR, Axes, Mesh, divisors
from tessera.parallel.modules import present
from tessera.runtime.modules import ExpertBalance, RowStatistics, StackedExperts, local_shard

WHERE = "the model's plan (experts)"
INDEX = 8  # bytes of one int64 expert index


@dataclass(frozen=True)
class ExpertPlan:
    modules: tuple[str, ...]  # modules with distributed experts, each an FSDP group
    ep: int
    stacks: Mapping[str, Mapping[str, int]]  # module with stacked experts -> parameter -> dimension that tp splits
    tp: int = 1
    sequence: bool = False  # whether tokens are sharded over tp ranks between layers
    row_sums: tuple[str, ...] = ()  # modules that sum statistics of a row, whose tokens are on several ranks
    choices: Mapping[str, int] = field(default_factory=dict)  # module with stacked experts -> experts per token


def plan_experts(section: ParallelSection, model_plan: ModelPlan, module: nn.Module, axes: Axes) -> ExpertPlan | None:
    """Return how ep and tp split the experts of a model, or raise if they cannot; None for a model without experts."""
    tree = dict(module.named_modules())
    if not model_plan.experts:
        if section.ep > 1:
            raise TesseraError(
                f"parallel.ep={section.ep} distributes experts, and the model has none",
                where="parallel.ep",
                allowed=[1],
                code="layout.model-without-experts",
            )
        return None
    paths = select(model_plan.experts, tree, WHERE)
    balances = {path: part for path, part in tree.items() if isinstance(part, ExpertBalance)}
    if section.pp > 1 and any(balance.coefficient > 0 for balance in balances.values()):
        raise TesseraError(
            "the load-balancing loss of experts needs all layers on one rank, but pipeline stages are on several ranks",
            where="parallel.pp",
            allowed=[1],
            fix="set output_router_logits: false in the model's config",
            code="layout.balance-loss-pipeline",
        )
    tp = axes.size(TENSOR)
    copy = axes.size(SHARD) * axes.size(EP)
    stacked = {path: part for path in paths if isinstance(part := tree[path], StackedExperts)}
    assert len(stacked) == len(paths), "modules that the plan names as experts derive from `StackedExperts`"
    _check_ep(section.ep, {path: _experts(part, path) for path, part in stacked.items()}, copy)
    stacks = {path: _split_dimensions(part, path, model_plan, tp) for path, part in stacked.items()}
    sequence = section.sequence_parallel and tp > 1
    if sequence:
        _check_routers(paths, model_plan, module)
    shared = axes.size(CONTEXT) > 1 or sequence
    return ExpertPlan(
        modules=tuple(paths) if section.ep > 1 else (),
        ep=section.ep,
        stacks=stacks,
        tp=tp,
        sequence=sequence,
        choices={path: part.top_k for path, part in stacked.items()},
        row_sums=tuple(path for path, part in tree.items() if shared and isinstance(part, RowStatistics)),
    )


def _experts(module: nn.Module, path: str) -> int:
    """Return the number of stacked experts of a module."""
    counts = {parameter.shape[0] for parameter in module.parameters(recurse=False) if parameter.dim() == 3}
    assert len(counts) == 1, f"{path} does not stack experts: each parameter is [experts, ...]"
    return int(counts.pop())


def _check_ep(ep: int, experts: Mapping[str, int], copy: int) -> None:
    """Raise if ep does not divide the number of experts. `copy`: number of ranks that share one copy of the model."""
    for path, count in experts.items():
        if count % ep:
            raise TesseraError(
                f"the {count} experts of {path} cannot be distributed evenly to parallel.ep={ep} ranks",
                where="parallel.ep",
                allowed=divisors(gcd(copy, *experts.values())),
                code="layout.experts-not-divisible",
            )


def _check_routers(paths: Sequence[str], model_plan: ModelPlan, module: nn.Module) -> None:
    """Raise for routers and other modules beside experts of style `replicate`.

    With sequence parallelism they get the tokens of one rank only.
    """
    for path in paths:
        owner = path.rpartition(".")[0]
        for name, _ in module.get_submodule(owner).named_parameters(prefix=owner):
            if any(matches(pattern, name) and style == "replicate" for pattern, style in model_plan.tensor.items()):
                raise TesseraError(
                    f"sequence_parallel shards the tokens of {name}, whose style in the model's plan is replicate",
                    where="parallel.sequence_parallel",
                    allowed=["false"],
                    fix="give it the style sequence in `ModelPlan.tensor`",
                    code="layout.router-style",
                )


def _split_dimensions(module: nn.Module, path: str, model_plan: ModelPlan, tp: int) -> dict[str, int]:
    """Return for each parameter the dimension that tp splits: the intermediate size of the experts.

    tp splits only one of the two matrices of a LoRA adapter; the other is left out.
    """
    dimensions: dict[str, int] = {}
    for name, parameter in module.named_parameters():
        style = next((s for pattern, s in model_plan.tensor.items() if matches(pattern, f"{path}.{name}")), None)
        if style == "heads" and is_factor(name):
            continue
        if style not in ("column", "row"):
            if tp > 1:
                raise TesseraError(
                    f"the family declares {style or 'no style'} for {path}.{name}; to split it needs column or row",
                    where="parallel.tp",
                    allowed=[1],
                    code="layout.expert-style",
                )
            continue
        dimensions[name] = parameter.dim() - (2 if style == "column" else 1)
        width = parameter.shape[dimensions[name]]
        if width % tp:
            raise TesseraError(
                f"the experts of {path} are {width} wide, which tp={tp} ranks cannot share evenly",
                where="parallel.tp",
                allowed=divisors(gcd(width, *model_plan.heads.values())),
                code="layout.expert-width-not-divisible",
            )
    return dimensions


def apply_experts(module: nn.Module, plan: ExpertPlan, mesh: Mesh) -> None:
    """Shard experts and replace `dispatch` by `RankDispatch`. `module` may be a pipeline stage."""
    ep, sliced = mesh.group(EP), mesh.group(TENSOR)
    if plan.ep > 1 or plan.tp > 1:
        ranks = _mesh(plan, mesh)
        for path in present(module, plan.stacks):
            experts = module.get_submodule(path)
            assert isinstance(experts, StackedExperts)
            _shard(experts, plan, path, ranks)
            implementation = experts.dispatch.implementation
            experts.dispatch = RankDispatch(implementation, ep, sliced, plan.sequence)  # type: ignore[arg-type]
    for path in present(module, plan.row_sums):
        part = module.get_submodule(path)
        assert isinstance(part, RowStatistics)
        inside = plan.sequence and isinstance(part, ExpertBalance)
        groups = [mesh.group(CONTEXT), sliced if inside else None]
        part.row_total = RankRowSum([group for group in groups if group is not None])
        if inside and isinstance(part, ExpertBalance):
            assert sliced is not None
            part.part_total = RankRowSum([sliced])
            part.register_forward_pre_hook(partial(_local_tokens, mesh.position(TENSOR), plan.tp))


def _mesh(plan: ExpertPlan, mesh: Mesh) -> DeviceMesh:
    """Return the mesh over which the experts of a layer are split: ep, tp or both."""
    if plan.ep == 1 or plan.tp == 1:
        return mesh.view(EP if plan.tp == 1 else TENSOR)
    parts = mesh.axes.views[TENSOR]
    with warnings.catch_warnings():
        # torch warns that slicing a flattened dimension is deprecated; see `slice_flattened_mesh`.
        warnings.filterwarnings("ignore", message="Slicing a flattened dim")
        return mesh.root[EP, parts[0] if len(parts) == 1 else TENSOR]


def _shard(experts: nn.Module, plan: ExpertPlan, path: str, ranks: DeviceMesh) -> None:
    for name, parameter in list(experts.named_parameters()):
        placements: list[Placement] = [Shard(0)] if plan.ep > 1 else []
        if plan.tp > 1:
            split = plan.stacks[path].get(name)
            placements.append(Replicate() if split is None else Shard(split))
        if all(placement.is_replicate() for placement in placements):
            continue
        # src_data_rank=None: no broadcast, since values are loaded later.
        shard = distribute_tensor(parameter.detach(), ranks, placements, src_data_rank=None)
        owner, _, kind = name.rpartition(".")
        setattr(experts.get_submodule(owner), kind, nn.Parameter(shard, requires_grad=parameter.requires_grad))


class RankRowSum(nn.Module):
    """Sum a statistic over the ranks that share a row of the batch, without gradient. Replaces `nn.moe.RowSum`."""

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        super().__init__()
        self.groups = groups

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        total = x.clone()
        for group in self.groups:
            dist.all_reduce(total, group=group)
        return total


def _local_tokens(position: int, parts: int, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """As a forward pre-hook of `ExpertBalance`, reduce its last argument, the row ids, to this rank's tokens."""
    *others, rows = args
    row, counts = (of_tokens.chunk(parts)[position] for of_tokens in (rows.row, rows.counts))
    return (*others, dataclasses.replace(rows, row=row, counts=counts))


class RankDispatch(nn.Module):
    """Send tokens to experts on other ranks.

    `ep`: ranks with different experts and different tokens. The host must know how many tokens go to each rank, so it
    waits for the device once per layer in each forward pass. `sliced`: ranks with a slice of each expert, whose
    outputs are summed. Sliced ranks have the same tokens, or with `sequence` a shard of them each; then the shards
    are gathered first.
    """

    def __init__(
        self,
        implementation: str,
        ep: dist.ProcessGroup | None = None,
        sliced: dist.ProcessGroup | None = None,
        sequence: bool = False,
    ) -> None:
        super().__init__()
        self.implementation = implementation
        self.ep = ep
        self.sliced = sliced
        self.sequence = sequence
        self.read_counts = read_counts  # a dry run replaces this function, since its tensors have no values

    def forward(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        gate: Tensor,
        up: Tensor,
        down: Tensor,
        beside: ExpertAdapters = NO_ADAPTERS,
    ) -> Tensor:
        # Compute with local shards. Their gradients are complete, except those of adapter matrices that all tp ranks
        # have: these are summed at the end of a step.
        first, second = (None if tensor is None else tensor.local() for tensor in beside)
        stacks = _Stacks(local_shard(gate), local_shard(up), local_shard(down), (first, second))
        if self.sliced is not None:
            x, weights = (with_backward(part, self._whole, self._summed) for part in (x, weights))
            ids = self._whole(ids)
        at = ExpertOrder.of(ids, gate.shape[0])
        rows = spread_rows(x, at, ids.shape[1])
        y = self._compute(rows, at.ends, stacks) if self.ep is None else self._exchange(rows, at, stacks, self.ep)
        out = weigh_choices(collect_rows(y, at), weights)
        return out if self.sliced is None else with_backward(out, self._summed, self._whole)

    def _whole(self, x: Tensor) -> Tensor:
        """Gather the tokens of all tp ranks, if they are sharded."""
        assert self.sliced is not None
        return gathered(x, self.sliced) if self.sequence else as_it_is(x)

    def _summed(self, x: Tensor) -> Tensor:
        """Sum expert outputs over tp ranks. With `sequence`, return the outputs of this rank's tokens only."""
        assert self.sliced is not None
        return scattered(x, self.sliced) if self.sequence else summed(x, self.sliced)

    def _exchange(self, rows: Tensor, at: ExpertOrder, stacks: _Stacks, group: dist.ProcessGroup) -> Tensor:
        """Send rows to the ranks of their experts, and return the expert outputs. `rows` are sorted by expert."""
        ranks, here = group.size(), stacks.gate.shape[0]
        sent = at.ends.diff(prepend=at.ends.new_zeros(1)).view(ranks, here)
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent, group=group)
        to_each, from_each = self.read_counts(torch.stack([sent.sum(1), got.sum(1)]), rows.shape[0])
        arrived = all_to_all(rows, to_each, from_each, group)
        # Rows arrive sorted by source rank, then by expert: sort them by expert.
        expert = torch.arange(here, device=rows.device).repeat(ranks)
        ids = expert.repeat_interleave(got.flatten(), output_size=arrived.shape[0])
        order = ExpertOrder.of(ids, here)
        y = collect_rows(self._compute(spread_rows(arrived, order, 1), order.ends, stacks), order)
        return all_to_all(y, from_each, to_each, group)

    def _compute(self, rows: Tensor, ends: Tensor, stacks: _Stacks) -> Tensor:
        return expert_mlp(rows, ends, *stacks, implementation=self.implementation)


class _Stacks(NamedTuple):
    """Hold the expert weights of a rank, and their adapters."""

    gate: Tensor
    up: Tensor
    down: Tensor
    beside: ExpertAdapters


def read_counts(counts: Tensor, rows: int) -> tuple[list[int], list[int]]:
    """Return how many rows go to each rank and come from each rank. `counts`: [2, ranks]. Waits for the device."""
    to_each, from_each = counts.tolist()
    return to_each, from_each
