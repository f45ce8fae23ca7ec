"""The matrices of LoRA adapters: between native layers and those of a folder or a file, and merged into weights.

Where one native layer is several foreign ones, or the other way round, matrices are put side by side: their ranks add
up, and the product is exactly the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tessera.checkpoint.weights import add_product
from tessera.errors import TesseraError
from tessera.lora.parts import plain_form, with_lengths
from tessera.lora.select import Adapter, Adapters, adapter_for, factor_names, magnitude_name, tensor_names, weight_names
from tessera.runtime.modules import whole_tensor
from tessera.weights.map import (
    ColumnsByHead,
    Concat,
    GroupedRows,
    Identity,
    Operation,
    RowOrder,
    TensorChunk,
    WeightMap,
)


@dataclass(frozen=True)
class Factors:
    """Hold one adapter with its two matrices."""

    adapter: Adapter
    a: Tensor  # [rank, in]; of stacked experts [experts, rank, in]
    b: Tensor  # [out, rank]; of stacked experts [experts, weights, out, rank]
    m: Tensor | None = None  # [out]: lengths of rows, of DoRA


def to_foreign(native: Mapping[str, Factors], weight_map: WeightMap, where: str) -> dict[str, Factors]:
    """Return adapters by the names that layers have in the form of a weight map."""
    made: dict[str, Factors] = {}
    for path, factors in native.items():
        match = weight_map.rule_for(f"{path}.weight")
        if match is None:
            raise TesseraError(f"the weight map has no rule for {path}.weight", where=where)
        rule, foreign = match
        check_operation(rule.op, path, where)
        modules = [weight_map.in_memory(name).removesuffix(".weight") for name in foreign]
        if isinstance(rule.op, TensorChunk):
            if modules[0] not in made:
                members = [native.get(n.removesuffix(".weight")) for n in weight_map.group_of(f"{path}.weight")]
                made[modules[0]] = _joined(rule.op, members)
            continue
        if isinstance(rule.op, ColumnsByHead):
            made[modules[0]] = Factors(factors.adapter, rule.op.to_foreign(factors.a)[0], factors.b, factors.m)
            continue
        # Lengths belong to rows: whatever moves the rows of B moves them.
        lengths = [None] * len(modules) if factors.m is None else rule.op.to_foreign(factors.m.unsqueeze(1))
        for module, b, m in zip(modules, rule.op.to_foreign(factors.b), lengths, strict=True):
            made[module] = Factors(factors.adapter, factors.a, b, None if m is None else m.flatten())
    return made


def _joined(op: TensorChunk, members: Sequence[Factors | None]) -> Factors:
    """Return the adapter of one foreign layer that is several native ones."""
    given = [factors for factors in members if factors is not None]
    m = op.join_chunks(_lengths(members))[0].whole().flatten() if given[0].adapter.dora else None
    if len(given) == len(members) and _same_input(given):
        blocks = [factors.b for factors in given]
        return Factors(given[0].adapter, given[0].a, op.join_chunks(blocks)[0].whole(), m)
    adapter, a, blocks = side_by_side(members, _rows(op, members))
    return Factors(adapter, a, op.join_chunks(blocks)[0].whole(), m)


def _lengths(members: Sequence[Factors | None]) -> list[Tensor]:
    """Return the lengths of rows [out, 1] of layers that are one elsewhere; raise if one of them has no adapter."""
    found = [one.m for one in members if one is not None and one.m is not None]
    if len(found) != len(members):
        raise TesseraError(
            "adapted layers are one layer with others in the other form, and with dora all of these need an adapter",
            where="model.lora.targets",
            fix="adapt all layers that belong together, or none of them",
        )
    return [m.unsqueeze(1) for m in found]


def _rows(op: TensorChunk, members: Sequence[Factors | None]) -> list[int]:
    """Return how many outputs each native layer has, also those without an adapter."""
    number, first = next((n, factors) for n, factors in enumerate(members) if factors is not None)
    if not isinstance(op, GroupedRows):
        return [first.b.shape[0]] * len(members)
    groups = first.b.shape[0] // op.rows[number]
    return [groups * rows for rows in op.rows]


def _same_input(given: Sequence[Factors]) -> bool:
    """Return whether adapters have one matrix A, so that their blocks of B can lie below each other."""
    first = given[0]
    return all(one.adapter == first.adapter and torch.equal(one.a, first.a) for one in given)


def side_by_side(present: Sequence[Factors | None], rows: Sequence[int]) -> tuple[Adapter, Tensor, list[Tensor]]:
    """Return an adapter whose rank is the sum of all ranks, matrix A, and a block of matrix B for each layer.

    `rows`: how many outputs each layer has. A layer without an adapter has a block of zeros.
    """
    given = [factors for factors in present if factors is not None]
    like, rank = given[0].adapter, sum(factors.adapter.rank for factors in given)
    blocks, at = [], 0
    for factors, outputs in zip(present, rows, strict=True):
        block = given[0].b.new_zeros(outputs, rank)
        if factors is not None:
            block[:, at : at + factors.adapter.rank] = factors.b * (factors.adapter.scale / like.scale)
            at += factors.adapter.rank
        blocks.append(block)
    return of_rank(like, rank), torch.cat([factors.a for factors in given]), blocks


def of_rank(like: Adapter, rank: int) -> Adapter:
    """Return an adapter of another rank with the same scale."""
    return replace(like, rank=rank, alpha=like.scale * (math.sqrt(rank) if like.rslora else rank))


def join_to_native(op: Operation, present: Sequence[Factors | None]) -> Factors:
    """Return one native adapter from those of the foreign layers that the native layer is made of."""
    given = [factors for factors in present if factors is not None]
    first = given[0]
    if isinstance(op, ColumnsByHead):
        return Factors(first.adapter, op.to_native([first.a]), first.b, first.m)
    m = op.to_native(_lengths(present)).flatten() if first.adapter.dora else None
    if isinstance(op, TensorChunk):
        return _without_idle_ranks(Factors(first.adapter, first.a, op.to_native([first.b]), m))
    if len(given) == len(present) and _same_input(given):
        return Factors(first.adapter, first.a, op.to_native([factors.b for factors in given]), m)
    rows = op.sizes if isinstance(op, Concat) else [first.b.shape[0]] * len(present)
    adapter, a, blocks = side_by_side(present, rows)
    return Factors(adapter, a, op.to_native(blocks), m)


def _without_idle_ranks(factors: Factors) -> Factors:
    """Leave out columns of B that are zero, with the rows of A that they are for: those of the other layers, where
    adapters of several layers lie side by side. All zeros are an adapter that was not trained, and stay."""
    used = factors.b.any(dim=0)
    if not used.any() or used.all():
        return factors
    adapter = of_rank(factors.adapter, int(used.sum()))
    return Factors(adapter, factors.a[used], factors.b[:, used].contiguous(), factors.m)


def check_operation(op: Operation, path: str, where: str) -> None:
    """Raise if a layer is none in the form of a weight map, so that an adapter of it cannot be stored there."""
    if not (_of_outputs(op) or isinstance(op, ColumnsByHead)):  # columns are reordered in matrix A
        raise TesseraError(
            f"{path} is no linear layer there ({type(op).__name__}): its adapter has no such form",
            where=where,
            fix="leave it out of model.lora.targets, or export with model.lora.merge",
        )


def _of_outputs(op: Operation) -> bool:
    """Return whether an operation only reorders and joins the outputs of layers: then it does the same to matrix B."""
    if isinstance(op, TensorChunk):
        return op.dim == 0 and _of_outputs(op.op)
    return isinstance(op, (Identity, RowOrder)) or (isinstance(op, Concat) and op.dim == 0)


@torch.no_grad()
def merge_adapter(name: str, weight: Tensor, tensors: Mapping[str, Tensor], adapters: Adapters) -> Tensor:
    """Return a new weight with its adapter added; the weight itself if it has none.

    All ranks that hold the weight call this together.
    """
    found = adapter_for(name, adapters)
    if found is None:
        return weight
    path, number = found
    own = {factor: tensors[factor] for factor in tensor_names(path, adapters[path])}
    plain, _ = plain_form(own, {path: adapters[path]})
    a, b = (whole_tensor(plain[factor]) for factor in factor_names(path))
    if adapters[path].stacked:
        b = b[:, number]
    merged = add_product(weight.detach().clone(), b, a, adapters[path].scale)
    return with_lengths(merged, own[magnitude_name(path)]) if adapters[path].dora else merged


@torch.no_grad()
def merge_factors(found: Mapping[str, Factors], tensors: Mapping[str, Tensor], strength: float, where: str) -> None:
    """Add adapters, `strength` times, to the weights of a model in place. Weights may be sharded."""
    every = ((path, factors, name) for path, factors in found.items() for name in weight_names(path, factors.adapter))
    for path, factors, name in every:
        weight = tensors.get(name)
        if weight is None:
            continue  # of another stage of a pipeline
        check_shapes(path, factors, tuple(weight.shape), where)
        if factors.m is not None:
            raise TesseraError(
                f"the adapter of {path} is of DoRA, which has no strength",
                where=where,
                fix="load the adapters by themselves: they name their model",
            )
        a, b = (matrix.to(weight.device) for matrix in (factors.a, factors.b))
        if factors.adapter.stacked:
            b = b[:, weight_names(path, factors.adapter).index(name)]
        add_product(weight, b, a, strength * factors.adapter.scale)


def check_shapes(path: str, factors: Factors, shape: Sequence[int], where: str) -> None:
    """Raise if an adapter does not fit the layer that it is for, whose weight has `shape`."""
    experts = factors.a.shape[:-2]
    made = (*experts, factors.b.shape[-2], factors.a.shape[-1])
    if made != tuple(shape):
        each, has = (f"{sizes[0]} experts, each " if len(sizes) > 2 else "" for sizes in (made, shape))
        raise TesseraError(
            f"the adapter of {path} is for {each or 'a layer '}of {made[-1]} inputs and {made[-2]} outputs, this model "
            f"has {has}{shape[-1]} and {shape[-2]}",
            where=where,
            fix="check that the adapters belong to this model: another size of the family has other layers",
        )
