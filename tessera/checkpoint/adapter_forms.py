"""Adapters from our layers to foreign ones and back, where one layer of ours is several of theirs, or the other way
round: matrices side by side have the ranks added up, and make exactly what they made apart. And merged into weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tessera.checkpoint.weights import add_product
from tessera.core.adapters import Adapter, Adapters, factor_names
from tessera.core.errors import TesseraError
from tessera.core.weightmap import Concat, GroupByHead, HalvesOfPairs, Operation, Part, Same, WeightMap


@dataclass(frozen=True)
class Factors:
    """One adapter with its numbers."""

    adapter: Adapter
    a: Tensor  # [rank, in]
    b: Tensor  # [out, rank]


def to_peft(ours: Mapping[str, Factors], weight_map: WeightMap, where: str) -> dict[str, Factors]:
    """By the names that modules have in memory there."""
    made: dict[str, Factors] = {}
    for path, factors in ours.items():
        match = weight_map.to_foreign(f"{path}.weight")
        if match is None:
            raise TesseraError(f"no rule of the weight map speaks of {path}.weight", where=where)
        rule, foreign = match
        check_operation(rule.op, path, where)
        modules = [weight_map.in_memory(name).removesuffix(".weight") for name in foreign]
        if isinstance(rule.op, Part):
            if modules[0] not in made:
                members = [n.removesuffix(".weight") for n in weight_map.together(f"{path}.weight")]
                made[modules[0]] = _side_by_side(rule.op, [ours.get(member) for member in members])
            continue
        for module, b in zip(modules, rule.op.to_theirs(factors.b), strict=True):
            made[module] = Factors(factors.adapter, factors.a, b)
    return made


def _side_by_side(op: Part, members: Sequence[Factors | None]) -> Factors:
    """One foreign adapter from those of our layers that are its parts."""
    given = [factors for factors in members if factors is not None]
    first = given[0]
    rank = sum(factors.adapter.rank for factors in given)
    blocks, at = [], 0
    for factors in members:
        block = first.b.new_zeros(first.b.shape[0], rank)
        if factors is not None:
            block[:, at : at + factors.adapter.rank] = factors.b * (factors.adapter.scale / first.adapter.scale)
            at += factors.adapter.rank
        blocks.append(block)
    return Factors(_of_scale(first.adapter, rank), torch.cat([f.a for f in given]), op.join(blocks)[0])


def _of_scale(like: Adapter, rank: int) -> Adapter:
    """Another rank, the same scale."""
    return Adapter(rank, like.scale * (math.sqrt(rank) if like.rslora else rank), like.rslora)


def join_to_ours(op: Operation, present: Sequence[Factors | None]) -> Factors:
    """One adapter of ours from those of the foreign layers that ours is made of."""
    given = [factors for factors in present if factors is not None]
    first = given[0]
    alike = all(torch.equal(one.a, first.a) and one.adapter == first.adapter for one in given)
    if len(given) == len(present) and alike:
        return Factors(first.adapter, first.a, op.to_ours([factors.b for factors in given]))
    rank = sum(factors.adapter.rank for factors in given)
    sizes = op.sizes if isinstance(op, Concat) else [first.b.shape[0]] * len(present)
    wide, at = [], 0
    for rows, factors in zip(sizes, present, strict=True):
        block = first.b.new_zeros(rows, rank)
        if factors is not None:
            block[:, at : at + factors.adapter.rank] = factors.b * (factors.adapter.scale / first.adapter.scale)
            at += factors.adapter.rank
        wide.append(block)
    return Factors(_of_scale(first.adapter, rank), torch.cat([f.a for f in given]), op.to_ours(wide))


def check_operation(op: Operation, path: str, where: str) -> None:
    if not _of_outputs(op):
        raise TesseraError(
            f"{path} is no linear layer there ({type(op).__name__}): its adapter has no PEFT form",
            where=where,
            fix="leave it out of model.lora.targets, or export with model.lora.merge",
        )


def _of_outputs(op: Operation) -> bool:
    """Whether an operation only orders and joins the outputs of layers: then it does the same to B."""
    if isinstance(op, Part):
        return op.dim == 0 and _of_outputs(op.op)
    return isinstance(op, (Same, GroupByHead, HalvesOfPairs)) or (isinstance(op, Concat) and op.dim == 0)


@torch.no_grad()
def merged(name: str, weight: Tensor, tensors: Mapping[str, Tensor], adapters: Adapters) -> Tensor:
    """A weight with its adapter added, in a tensor of its own; as it is where it has none. All ranks that hold the
    weight call this together."""
    path = name.removesuffix(".weight")
    if path not in adapters or path == name:
        return weight
    a, b = (_whole(tensors[factor]) for factor in factor_names(path))
    return add_product(weight.detach().clone(), b, a, adapters[path].scale)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
