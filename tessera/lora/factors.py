"""Translate LoRA matrices between native layers (of Tessera's model) and layers of a file, and merge them into weights.

If a native layer is several foreign layers (q, k, v), their adapters become one adapter on import; if a foreign layer
is several native layers, they become one on export. The product stays the same: adapters that share A keep it and join
their B, otherwise the matrices are placed side by side and the ranks add up. PiSSA is exported as plain LoRA of twice
the rank: B A minus its initial value.

A weight map has rules for weights. The name of a module is here the name of its weight without `.weight`. "Canonical"
names are spelled as in the rules of the weight map, names "in memory" as in the classes of transformers and in PEFT.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tessera.checkpoint.weights import add_product
from tessera.errors import TesseraError
from tessera.lora.select import (
    Adapter,
    Adapters,
    adapter_for,
    factor_names,
    magnitude_name,
    start_names,
    tensor_names,
    weight_names,
)
from tessera.runtime.modules import whole_tensor
from tessera.weights.map import WeightMap
from tessera.weights.operations import (
    ColumnsByHead,
    Concat,
    GroupedRows,
    Identity,
    Operation,
    RowOrder,
    Stack,
    TensorChunk,
)

_WEIGHT = ".weight"


@dataclass(frozen=True)
class Factors:
    """Hold the matrices A and B of one adapter, and its settings."""

    adapter: Adapter
    a: Tensor  # [rank, in]; for stacked experts [experts, rank, in]
    b: Tensor  # [out, rank]; for stacked experts [experts, N, out, rank], N = 2 for gate and up, 1 for down
    m: Tensor | None = None  # [out]: row norms of DoRA, which are trained


# ---------------------------------------------------------------------------------------------- names


def layer_paths(parameters: Iterable[str]) -> list[str]:
    """Return the names of all layers that have a parameter `weight`."""
    return [name.removesuffix(_WEIGHT) for name in parameters if name.endswith(_WEIGHT)]


def modules_of(path: str, weight_map: WeightMap) -> tuple[Operation, list[str]] | None:
    """Return the weight map's operation and the canonical module names for a native layer; None without a rule."""
    match = weight_map.rule_for(f"{path}{_WEIGHT}")
    return None if match is None else (match[0].op, [name.removesuffix(_WEIGHT) for name in match[1]])


def native_group(path: str, weight_map: WeightMap) -> list[str]:
    """Return the native layers that are fused with this layer into one foreign module, in order."""
    return [name.removesuffix(_WEIGHT) for name in weight_map.group_of(f"{path}{_WEIGHT}")]


def canonical(module: str, weight_map: WeightMap) -> str:
    """Return the canonical name of a module."""
    return weight_map.canonical(f"{module}{_WEIGHT}").removesuffix(_WEIGHT)


def in_memory(module: str, weight_map: WeightMap) -> str:
    """Return the name of a module in the classes of transformers. `module`: its canonical name."""
    return weight_map.in_memory(f"{module}{_WEIGHT}").removesuffix(_WEIGHT)


def all_modules(parameters: Iterable[str], weight_map: WeightMap) -> set[str]:
    """Return the names in transformers of all modules that have these native parameters."""
    rules = [modules_of(path, weight_map) for path in layer_paths(parameters)]
    return {in_memory(module, weight_map) for rule in rules if rule for module in rule[1]}


def experts_in_memory(path: str, weight_map: WeightMap, where: str) -> str:
    """Return the name of a module of experts in transformers, whose classes always stack experts."""
    rule, names = weight_map.required_rule(f"{path}.down", where)
    # Return X.experts of X.experts.down_proj, or of X.experts.0.down_proj.weight (one per expert).
    return weight_map.in_memory(names[0]).rsplit(".", 3 if isinstance(rule.op, Stack) else 1)[0]


def parameters_in_memory(names: Collection[str], weight_map: WeightMap) -> dict[str, tuple[str, ...]]:
    """Return native name -> names in transformers for fully trained parameters."""
    rules = {name: weight_map.required_rule(name, "model.lora.modules_to_save") for name in names}
    return {name: tuple(map(weight_map.in_memory, foreign)) for name, (_, foreign) in rules.items()}


# ---------------------------------------------------------------------------------------------- between forms


def to_foreign(native: Mapping[str, Factors], weight_map: WeightMap, where: str) -> dict[str, Factors]:
    """Translate native adapters to the modules of a weight map's format, named as in transformers."""
    foreign: dict[str, Factors] = {}
    for path, factors in native.items():
        rule, names = weight_map.required_rule(f"{path}{_WEIGHT}", where)
        op, modules = rule.op, [weight_map.in_memory(name).removesuffix(_WEIGHT) for name in names]
        check_operation(op, path, where)
        if isinstance(op, TensorChunk):
            if modules[0] not in foreign:
                foreign[modules[0]] = _joined(op, [native.get(name) for name in native_group(path, weight_map)])
            continue
        if isinstance(op, ColumnsByHead):
            foreign[modules[0]] = replace(factors, a=op.to_foreign(factors.a)[0])
            continue
        # DoRA's norms belong to rows: they are reordered like the rows of B.
        norms = [None] * len(modules) if factors.m is None else op.to_foreign(factors.m.unsqueeze(1))
        for module, b, m in zip(modules, op.to_foreign(factors.b), norms, strict=True):
            foreign[module] = Factors(factors.adapter, factors.a, b, None if m is None else m.flatten())
    return foreign


def join_to_native(op: Operation, members: Sequence[Factors | None]) -> Factors:
    """Join the adapters of the foreign modules of one native layer into a native adapter."""
    present = [factors for factors in members if factors is not None]
    first = present[0]
    if isinstance(op, ColumnsByHead):
        return replace(first, a=op.to_native([first.a]))
    m = op.to_native(_norms(members)).flatten() if first.adapter.dora else None
    if isinstance(op, TensorChunk):
        return _without_idle_ranks(Factors(first.adapter, first.a, op.to_native([first.b]), m))
    if len(present) == len(members) and _same_input(present):
        return Factors(first.adapter, first.a, op.to_native([factors.b for factors in present]), m)
    rows = op.sizes if isinstance(op, Concat) else [first.b.shape[0]] * len(members)
    adapter, a, blocks = side_by_side(members, rows)
    return Factors(adapter, a, op.to_native(blocks), m)


def _joined(op: TensorChunk, members: Sequence[Factors | None]) -> Factors:
    """Join the adapters of several native layers into the adapter of one fused foreign module."""
    present = [factors for factors in members if factors is not None]
    m = op.join_chunks(_norms(members))[0].whole().flatten() if present[0].adapter.dora else None
    if len(present) == len(members) and _same_input(present):
        blocks = [factors.b for factors in present]
        return Factors(present[0].adapter, present[0].a, op.join_chunks(blocks)[0].whole(), m)
    adapter, a, blocks = side_by_side(members, _rows(op, members))
    return Factors(adapter, a, op.join_chunks(blocks)[0].whole(), m)


def _norms(members: Sequence[Factors | None]) -> list[Tensor]:
    """Return DoRA's norms [out, 1] of the rows of each layer to fuse; raise if a layer has no DoRA adapter."""
    norms = [factors.m for factors in members if factors is not None and factors.m is not None]
    if len(norms) != len(members):
        raise TesseraError(
            "with dora, all layers that are fused in the file format need an adapter (such as q, k and v)",
            where="model.lora.targets",
            fix="adapt all layers that are fused, or none of them",
            code="adapter.fused-layers-incomplete",
        )
    return [m.unsqueeze(1) for m in norms]


def _rows(op: TensorChunk, members: Sequence[Factors | None]) -> list[int]:
    """Return the number of output features of each native layer, including layers without an adapter."""
    number, first = next((n, factors) for n, factors in enumerate(members) if factors is not None)
    if not isinstance(op, GroupedRows):
        return [first.b.shape[0]] * len(members)
    groups = first.b.shape[0] // op.rows[number]
    return [groups * rows for rows in op.rows]


def _same_input(members: Sequence[Factors]) -> bool:
    """Return whether all adapters have the same settings and matrix A, so that only B needs joining."""
    first = members[0]
    return all(factors.adapter == first.adapter and torch.equal(factors.a, first.a) for factors in members)


def side_by_side(members: Sequence[Factors | None], rows: Sequence[int]) -> tuple[Adapter, Tensor, list[Tensor]]:
    """Join the adapters of several layers: return an adapter with the sum of their ranks, its A, and B of each layer.

    `rows`: the number of outputs of each layer. A layer without an adapter gets a block of zeros.
    """
    present = [factors for factors in members if factors is not None]
    like, rank = present[0].adapter, sum(factors.adapter.rank for factors in present)
    blocks, at = [], 0
    for factors, outputs in zip(members, rows, strict=True):
        block = present[0].b.new_zeros(outputs, rank)
        if factors is not None:
            block[:, at : at + factors.adapter.rank] = factors.b * (factors.adapter.scale / like.scale)
            at += factors.adapter.rank
        blocks.append(block)
    return of_rank(like, rank), torch.cat([factors.a for factors in present]), blocks


def of_rank(like: Adapter, rank: int) -> Adapter:
    """Return an adapter like `like` with another rank and the same scale."""
    return replace(like, rank=rank, alpha=like.scale * (math.sqrt(rank) if like.rslora else rank))


def _without_idle_ranks(factors: Factors) -> Factors:
    """Remove zero columns of B and the matching rows of A: in a fused adapter they belong to other layers.

    If all of B is zero, the adapter is untrained and stays unchanged.
    """
    used = factors.b.any(dim=0)
    if not used.any() or used.all():
        return factors
    adapter = of_rank(factors.adapter, int(used.sum()))
    return Factors(adapter, factors.a[used], factors.b[:, used].contiguous(), factors.m)


def check_operation(op: Operation, path: str, where: str) -> None:
    """Raise if `path` is not stored as a linear layer in the format to write, so its adapter cannot be translated."""
    if not (_of_outputs(op) or isinstance(op, ColumnsByHead)):  # column order affects only A
        raise TesseraError(
            f"{path} is not a linear layer in this format ({type(op).__name__}): its adapter cannot be translated",
            where=where,
            fix="leave it out of model.lora.targets, or export with model.lora.merge",
            code="adapter.not-linear-elsewhere",
        )


def _of_outputs(op: Operation) -> bool:
    """Return whether an operation only reorders or joins outputs, so that it can be applied to matrix B."""
    if isinstance(op, TensorChunk):
        return op.dim == 0 and _of_outputs(op.op)
    return isinstance(op, (Identity, RowOrder)) or (isinstance(op, Concat) and op.dim == 0)


# ---------------------------------------------------------------------------------------------- merging


@torch.no_grad()
def plain_form(tensors: Mapping[str, Tensor], adapters: Adapters) -> tuple[dict[str, Tensor], Adapters]:
    """Convert PiSSA adapters to plain LoRA of twice the rank and the same scale.

    `tensors` may belong to one pipeline stage; `adapters` are those of all stages.
    """
    matrices, plain = dict(tensors), dict(adapters)
    for path, adapter in adapters.items():
        if not adapter.pissa:
            continue
        alpha = adapter.alpha * (2**0.5 if adapter.rslora else 2)  # the scale stays the same at twice the rank
        plain[path] = replace(adapter, rank=2 * adapter.rank, alpha=alpha, pissa=False)
        (a, b), (a0, b0) = factor_names(path), start_names(path)
        if a in tensors:
            matrices[a] = torch.cat([whole_tensor(tensors[a]), whole_tensor(tensors[a0])])
            matrices[b] = torch.cat([whole_tensor(tensors[b]), -whole_tensor(tensors[b0])], dim=1)
    return matrices, plain


@torch.no_grad()
def merge_adapter(name: str, weight: Tensor, tensors: Mapping[str, Tensor], adapters: Adapters) -> Tensor:
    """Return a new weight with its adapter merged; the weight itself if it has no adapter.

    All ranks that have a shard of the weight call this together.
    """
    match = adapter_for(name, adapters)
    if match is None:
        return weight
    path, number = match
    parts = {factor: tensors[factor] for factor in tensor_names(path, adapters[path])}
    plain, _ = plain_form(parts, {path: adapters[path]})
    a, b = (whole_tensor(plain[factor]) for factor in factor_names(path))
    if adapters[path].stacked:
        b = b[:, number]
    merged = add_product(weight.detach().clone(), b, a, adapters[path].scale)
    return _with_norms(merged, parts[magnitude_name(path)]) if adapters[path].dora else merged


def _with_norms(weight: Tensor, magnitude: Tensor) -> Tensor:
    """Scale the rows of a merged weight to DoRA's trained norms."""
    norms = torch.linalg.vector_norm(whole_tensor(weight), dim=1, dtype=torch.float32)
    ratio = (whole_tensor(magnitude).float() / norms.clamp(min=1e-38)).to(weight.dtype).unsqueeze(1)
    if isinstance(weight, DTensor):
        ratio = DTensor.from_local(ratio, weight.device_mesh, run_check=False)  # every rank has all of `ratio`
    scaled: Tensor = weight * ratio
    return scaled


@torch.no_grad()
def merge_factors(adapters: Mapping[str, Factors], tensors: Mapping[str, Tensor], strength: float, where: str) -> None:
    """Merge adapters, multiplied by `strength`, into the weights of a model in place. Weights may be sharded."""
    every = (
        (path, factors, name) for path, factors in adapters.items() for name in weight_names(path, factors.adapter)
    )
    for path, factors, name in every:
        weight = tensors.get(name)
        if weight is None:
            continue  # the weight is on another pipeline stage
        check_shapes(path, factors, tuple(weight.shape), where)
        if factors.m is not None:
            raise TesseraError(
                f"{path} has a DoRA adapter, which cannot be scaled by a strength and merged into a model",
                where=where,
                fix="load the adapter folder in place of the model, without --adapter",
                code="adapter.dora-strength",
            )
        a, b = (matrix.to(weight.device) for matrix in (factors.a, factors.b))
        if factors.adapter.stacked:
            b = b[:, weight_names(path, factors.adapter).index(name)]
        add_product(weight, b, a, strength * factors.adapter.scale)


def check_shapes(path: str, factors: Factors, shape: Sequence[int], where: str) -> None:
    """Raise unless an adapter fits a layer whose weight has `shape`."""
    experts = factors.a.shape[:-2]
    product = (*experts, factors.b.shape[-2], factors.a.shape[-1])
    if product != tuple(shape):
        each, has = (f"{sizes[0]} experts, each " if len(sizes) > 2 else "" for sizes in (product, shape))
        raise TesseraError(
            f"the adapter of {path} is for {each or 'a layer '}of {product[-1]} inputs and {product[-2]} outputs, this "
            f"model has {has}{shape[-1]} and {shape[-2]}",
            where=where,
            fix="check that the adapters belong to this size of the model",
            code="adapter.shape-mismatch",
        )
