"""Fill a model's tensors by a weight map, and check a folder before the model is built.

Native tensors are those of Tessera's model, foreign tensors those of the files. The first part finds the foreign
tensors of each native tensor, and reports missing and unused ones. The second part compares config.json with headers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tessera.checkpoint.folder_tensors import FolderTensors
from tessera.errors import TesseraError, nearest
from tessera.runtime.modules import copy_shard, local_parts
from tessera.runtime.torch_internals import local_chunks, tensor_of_chunk
from tessera.weights.map import WeightMap
from tessera.weights.operations import ByBox, Operation, can_read_boxes, shape_of

Shape = tuple[int, ...]
ReadBox = Callable[[str, Sequence[int], Sequence[int]], Tensor]  # (foreign name, offsets, sizes) -> box of the tensor


@dataclass(frozen=True)
class TensorSource:
    """Hold the names of the foreign tensors of a native tensor, and the operation that makes it from them."""

    native: str
    foreign: tuple[str, ...]
    op: Operation


def plan_reading(
    native: Collection[str],
    available: Collection[str],
    weight_map: WeightMap,
    *,
    tied: Mapping[str, str],
    expected: Iterable[str],
    where: str,
) -> list[TensorSource]:
    """Return the source of each name in `native`. Raise if tensors of the model are missing, or others are stored.

    `expected`: all names of the model, with those of other ranks.
    """
    weight_map = weight_map.for_names(available)
    stored_names = {weight_map.canonical(name): name for name in available}
    twins: dict[str, list[str]] = {}
    for alias, name in tied.items():
        twins.setdefault(name, []).append(alias)
    sources: list[TensorSource] = []
    missing: list[str] = []
    used: set[str] = set()
    for name in dict.fromkeys([*native, *expected]):
        # A tied tensor may be stored under one of its names, or under both.
        source = None
        for candidate in (name, *twins.get(name, ())):
            match = weight_map.rule_for(candidate)
            if match is None:
                continue
            rule, foreign = match
            used.update(foreign)
            if source is None and all(f in stored_names for f in foreign):
                source = TensorSource(name, tuple(stored_names[f] for f in foreign), rule.op)
        if source is None:
            missing.append(name)
        elif name in native:
            sources.append(source)
    left_over = [stored_names[f] for f in stored_names if f not in used and not weight_map.skips(f)]
    if missing or left_over:
        raise _misfit(missing, left_over, weight_map, where)
    return sources


def _misfit(missing: list[str], left_over: list[str], weight_map: WeightMap, where: str) -> TesseraError:
    lines: list[str] = []
    for name in missing[:10]:
        match = weight_map.rule_for(name)
        wanted = ", ".join(match[1]) if match else "the weight map has no rule for it"
        near = nearest(match[1][0], left_over) if match else None
        lines.append(f"missing: {name} ({wanted})" + (f"; the folder has {near}" if near else ""))
    lines += [f"unexpected: {name}" for name in left_over[:10]]
    more = max(0, len(missing) - 10) + max(0, len(left_over) - 10)
    if more:
        lines.append(f"and {more} more")
    return TesseraError(
        "the weights do not fit the model:\n    " + "\n    ".join(lines),
        where=where,
        fix="check that config.json belongs to these weights, and that the model family is right",
        code="weights.model-mismatch",
    )


@torch.no_grad()
def fill(target: Tensor, source: TensorSource, shapes: Mapping[str, Shape], read: ReadBox, where: str) -> None:
    """Fill one native tensor. A rank reads only the bytes of its shard, if the operation supports boxes."""
    shapes_fit(source, tuple(target.shape), shapes, where)
    foreign_shapes = [shapes[name] for name in source.foreign]
    boxes = local_chunks(target)
    if can_read_boxes(source.op):
        assert isinstance(source.op, ByBox)
        for box in boxes:
            needed = source.op.boxes(box.offsets, box.sizes, foreign_shapes)
            read_boxes = [read(source.foreign[number], offsets, sizes) for number, offsets, sizes in needed]
            tensor_of_chunk(target, box.offsets).copy_(
                source.op.join_boxes(read_boxes, box.offsets, box.sizes, foreign_shapes)
            )
        return
    if not boxes:
        return
    tensor = source.op.to_native([read(name, [0] * len(shapes[name]), shapes[name]) for name in source.foreign])
    copy_shard(target, tensor)


def shapes_fit(source: TensorSource, native: Shape, shapes: Mapping[str, Shape], where: str) -> None:
    """Raise if the foreign tensors do not give the native shape. No data is read."""
    try:
        shape = shape_of(source.op, [shapes[name] for name in source.foreign])
    except RuntimeError as error:
        sources = ", ".join(f"{name} {list(shapes[name])}" for name in source.foreign)
        raise TesseraError(
            f"{source.native} cannot be made from {sources}: {error}", where=where, code="weights.model-mismatch"
        ) from error
    if native != shape:
        raise TesseraError(
            f"{source.native} has shape {list(native)}, but {' + '.join(source.foreign)} gives {list(shape)}",
            where=where,
            fix="check that config.json belongs to these weights",
            code="weights.shape-mismatch",
        )


@torch.no_grad()
def add_product(target: Tensor, b: Tensor, a: Tensor, scale: float) -> Tensor:
    """Add `scale` * b @ a to a tensor, which may be sharded. Each rank computes its shard; b and a are unsharded.

    Products of stacked experts are computed one expert at a time, to save memory.
    """
    for shard, (*stacked, rows, columns) in local_parts(target):
        if not stacked:
            shard.copy_(shard.float() + scale * (b[rows].float() @ a[:, columns].float()))
            continue
        for part, part_b, part_a in zip(shard, b[stacked[0]], a[stacked[0]], strict=True):
            part.copy_(part.float() + scale * (part_b[rows].float() @ part_a[:, columns].float()))
    return target


@torch.no_grad()
def replace_tensors(targets: Mapping[str, Tensor], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy values into tensors by name. If a target is sharded, its value is unsharded, or sharded in the same way."""
    for name, value in tensors:
        target = targets.get(name)
        if target is None:
            raise TesseraError(
                f"the model has no weight {name}", nearest=nearest(name, targets), code="weights.name-not-in-model"
            )
        if value.shape != target.shape:
            raise TesseraError(
                f"the new {name} has shape {list(value.shape)}, but that of the model has {list(target.shape)}",
                fix="use weights of a model of this size",
                code="weights.shape-not-of-model",
            )
        if isinstance(value, DTensor):
            target.copy_(value)
        else:
            copy_shard(target, value)


_COMPARED = 16 << 20  # number of values that are compared at a time


def check_copies(weight_map: WeightMap, shapes: Mapping[str, Shape], read: ReadBox, where: str) -> None:
    """Raise if config.json ties the head to the embeddings, and the folder stores both with different values."""
    stored_names = {weight_map.canonical(name): name for name in shapes}
    for copied, native in weight_map.copies:
        match = weight_map.rule_for(native)
        if match is None or copied not in stored_names or match[1][0] not in stored_names:
            continue
        copy, other = stored_names[copied], stored_names[match[1][0]]
        check_copy(copy, other, shapes, read, where)


def check_copy(copy: str, other: str, shapes: Mapping[str, Shape], read: ReadBox, where: str) -> None:
    """Raise unless the stored tensors `copy` and `other`, a tied head and its embedding, are equal."""
    if not same_numbers(copy, other, shapes, read):
        raise TesseraError(
            f"config.json ties the head to the embeddings, and {copy} differs from {other}",
            where=where,
            fix='set "tie_word_embeddings": false in config.json, and in its text_config if there is one',
            code="weights.tied-head-differs",
        )


def same_numbers(name: str, other: str, shapes: Mapping[str, Shape], read: ReadBox) -> bool:
    """Return whether two stored tensors are equal. They are read in blocks of rows."""
    shape = shapes[name]
    if shape != shapes[other]:
        return False
    rows = max(1, _COMPARED // max(1, math.prod(shape[1:])))
    for start in range(0, shape[0], rows):
        box = ((start, *[0] * (len(shape) - 1)), (min(rows, shape[0] - start), *shape[1:]))
        if not torch.equal(read(name, *box), read(other, *box)):
            return False
    return True


# Keys of config.json with a number of layers. A layer has at least one tensor, so layers cannot exceed tensors.
_LAYERS = frozenset(
    {"num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth", "depths", "layers", "encoder_layers"}
    | {"decoder_layers", "num_encoder_layers", "num_decoder_layers"}
)
_LAYERS_ANYWAY = 4096  # up to this number of layers, a model is built quickly enough to need no check
_LARGEST = 1 << 53  # maximum of numbers in config.json: up to it, floats represent all integers


def check_config_numbers(data: Mapping[str, Any], folder: Path) -> None:
    """Raise if config.json contains an impossibly large number, or more than 4096 layers and fewer tensors than layers.

    4096 is `_LAYERS_ANYWAY`.
    """
    most: int | None = None
    for name, number in _numbers(data, ""):
        if not math.isfinite(number) or abs(number) > _LARGEST:
            raise TesseraError(
                f"{name} = {str(number)[:30]} is impossibly large",
                where=str(folder / "config.json"),
                code="model.absurd-size",
            )
        if name.rpartition(".")[2] not in _LAYERS or number <= _LAYERS_ANYWAY:
            continue
        if most is None:
            with FolderTensors(folder) as stored:
                most = len(stored.shapes)
        if number > most:
            raise TesseraError(
                f"{name} = {number}, but the folder has only {most} tensors",
                where=str(folder / "config.json"),
                fix="check that config.json belongs to these weights",
                code="weights.fewer-than-layers",
            )


def _numbers(data: Any, name: str) -> Iterator[tuple[str, int | float]]:
    """Yield all numbers with their dotted keys. Numbers in a list have the key of the list."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield from _numbers(value, f"{name}.{key}".lstrip("."))
    elif isinstance(data, Sequence) and not isinstance(data, str):
        for value in data:
            yield from _numbers(value, name)
    elif isinstance(data, int | float) and not isinstance(data, bool):
        yield name, data
