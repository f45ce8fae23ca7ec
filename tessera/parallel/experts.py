"""Expert parallelism: each rank computes some of the experts, and tokens travel to them and back.

With tp, each rank of a layer has a slice of the width of its experts. A module with stacked experts has a child
`dispatch` without weights, which brings tokens to them (`nn.moe.Dispatch`): that is what is replaced.
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
INDEX = 8  # bytes of the number of an expert


@dataclass(frozen=True)
class ExpertPlan:
    modules: tuple[str, ...]  # hold stacked experts that ranks share; each is a shard group of its own
    ep: int
    stacks: Mapping[str, Mapping[str, int]]  # modules with stacked experts -> parameter -> dimension that tp splits
    tp: int = 1
    sequence: bool = False  # whether each tp rank has a part of the tokens between layers
    row_sums: tuple[str, ...] = ()  # modules that add up over a row, where several ranks share a row
    choices: Mapping[str, int] = field(default_factory=dict)  # modules with stacked experts -> how many a token chooses


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
            "the loss that keeps experts evenly used pools all layers, and a pipeline's stages have some of them each",
            where="parallel.pp",
            allowed=[1],
            fix="set output_router_logits: false for the model's experts, as published folders have it",
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
    """Return how many experts a module stacks."""
    counts = {parameter.shape[0] for parameter in module.parameters(recurse=False) if parameter.dim() == 3}
    assert len(counts) == 1, f"{path} does not stack experts: each parameter is [experts, ...]"
    return int(counts.pop())


def _check_ep(ep: int, experts: Mapping[str, int], copy: int) -> None:
    """Refuse an ep that does not divide the experts. `copy`: the ranks that share one copy, of which ep is a factor."""
    for path, count in experts.items():
        if count % ep:
            raise TesseraError(
                f"the {count} experts of {path} cannot be distributed evenly to parallel.ep={ep} ranks",
                where="parallel.ep",
                allowed=divisors(gcd(copy, *experts.values())),
                code="layout.experts-not-divisible",
            )


def _check_routers(paths: Sequence[str], model_plan: ModelPlan, module: nn.Module) -> None:
    """Refuse routers that see all tokens by the plan: with sequence parallelism each rank has a part of them."""
    for path in paths:
        owner = path.rpartition(".")[0]
        for name, _ in module.get_submodule(owner).named_parameters(prefix=owner):
            if any(matches(pattern, name) and style == "replicate" for pattern, style in model_plan.tensor.items()):
                raise TesseraError(
                    f"sequence_parallel gives {name} a part of the tokens, and by the model's plan it sees all",
                    where="parallel.sequence_parallel",
                    allowed=["false"],
                    fix="in the model's plan (tensor), its style is sequence",
                    code="layout.router-style",
                )


def _split_dimensions(module: nn.Module, path: str, model_plan: ModelPlan, tp: int) -> dict[str, int]:
    """Return the dimension of each parameter that tp splits: of each expert, its width.

    Of an adapter tp splits one matrix, and all ranks have the other one."""
    dimensions: dict[str, int] = {}
    for name, parameter in module.named_parameters():
        style = next((s for pattern, s in model_plan.tensor.items() if matches(pattern, f"{path}.{name}")), None)
        if style == "heads" and is_factor(name):
            continue
        if style not in ("column", "row"):
            if tp > 1:
                raise TesseraError(
                    f"the model's plan does not split {path}.{name}: {style or 'no style'} is not column or row",
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
    """Shard experts and replace their dispatch. `module` may be a pipeline stage that lacks some modules."""
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
    """Return the mesh of the ranks that have different parts of one layer's experts."""
    if plan.ep == 1 or plan.tp == 1:
        return mesh.view(EP if plan.tp == 1 else TENSOR)
    parts = mesh.axes.views[TENSOR]
    with warnings.catch_warnings():
        # As in `Mesh.copies`: an axis beside a joined one has no other public spelling yet.
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
        # Nothing is sent here: weights are filled later, on each rank its own.
        shard = distribute_tensor(parameter.detach(), ranks, placements, src_data_rank=None)
        owner, _, kind = name.rpartition(".")
        setattr(experts.get_submodule(owner), kind, nn.Parameter(shard, requires_grad=parameter.requires_grad))


class RankRowSum(nn.Module):
    """Sum over the ranks that share a row, without a gradient. It replaces `nn.moe.RowSum`, which returns its input."""

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
    """Reduce, as a forward pre-hook of `ExpertBalance`, its last argument (`nn.moe.RowIds`) to this rank's tokens."""
    *others, rows = args
    row, counts = (of_tokens.chunk(parts)[position] for of_tokens in (rows.row, rows.counts))
    return (*others, dataclasses.replace(rows, row=row, counts=counts))


class RankDispatch(nn.Module):
    """Send tokens to their experts where a rank has some of the experts, or a slice of each.

    `ep`: ranks that have different experts, each with its own tokens. How many tokens go where is known on the device
    only, and an exchange of uneven parts needs it on the host: one wait per layer and pass, the only one.
    `sliced`: ranks with a slice of every expert here; their outputs for a token add up. They have the same tokens, or,
    with `sequence`, each a part of them, which is gathered first.
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
        self.read_counts = read_counts  # replaced in a dry run, whose tensors have no values

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
        # Plain tensors: the gradient of this rank's shard comes from the tokens sent to it, and is complete. Only of an
        # adapter's matrix that all ranks of a slice have, each computes a part, which is summed at the end of a step.
        first, second = (None if one is None else one.local() for one in beside)
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
        """Return the tokens of all ranks that share the slices of an expert."""
        assert self.sliced is not None
        return gathered(x, self.sliced) if self.sequence else as_it_is(x)

    def _summed(self, x: Tensor) -> Tensor:
        """Return the sums over slices, for the tokens that this rank has."""
        assert self.sliced is not None
        return scattered(x, self.sliced) if self.sequence else summed(x, self.sliced)

    def _exchange(self, rows: Tensor, at: ExpertOrder, stacks: _Stacks, group: dist.ProcessGroup) -> Tensor:
        """Send tokens to the ranks of their experts and back. Sorted by expert they are sorted by rank as well."""
        ranks, here = group.size(), stacks.gate.shape[0]
        sent = at.ends.diff(prepend=at.ends.new_zeros(1)).view(ranks, here)
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent, group=group)
        to_each, from_each = self.read_counts(torch.stack([sent.sum(1), got.sum(1)]), rows.shape[0])
        arrived = all_to_all(rows, to_each, from_each, group)
        # They arrive sorted by rank, then by expert, and are needed sorted by expert.
        expert = torch.arange(here, device=rows.device).repeat(ranks)
        ids = expert.repeat_interleave(got.flatten(), output_size=arrived.shape[0])
        order = ExpertOrder.of(ids, here)
        y = collect_rows(self._compute(spread_rows(arrived, order, 1), order.ends, stacks), order)
        return all_to_all(y, from_each, to_each, group)

    def _compute(self, rows: Tensor, ends: Tensor, stacks: _Stacks) -> Tensor:
        return expert_mlp(rows, ends, *stacks, implementation=self.implementation)


class _Stacks(NamedTuple):
    """Hold the weights of the experts of a rank, and of their adapters."""

    gate: Tensor
    up: Tensor
    down: Tensor
    beside: ExpertAdapters


def read_counts(counts: Tensor, rows: int) -> tuple[list[int], list[int]]:
    """Return how many of the `rows` go to each rank, and how many come from each: [2, ranks], read on the host."""
    to_each, from_each = counts.tolist()
    return to_each, from_each
