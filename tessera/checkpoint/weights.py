"""Fill a model's tensors by a weight map, and check a folder before memory is allocated.

The first part finds the foreign tensors that make a native one, and those that are missing or unused. The second part
compares the config.json of a folder with the headers of its weight files, before layers are built.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tessera.checkpoint.files import DTYPES, box_slices
from tessera.checkpoint.folder_tensors import FolderTensors
from tessera.errors import TesseraError, nearest
from tessera.runtime.torch_internals import local_chunks, tensor_of_chunk
from tessera.weights.map import WeightMap
from tessera.weights.operations import ByBox, Operation, can_read_boxes, shape_of

Shape = tuple[int, ...]
ReadBox = Callable[[str, Sequence[int], Sequence[int]], Tensor]  # (foreign name, offsets, sizes) -> that part of it


@dataclass(frozen=True)
class TensorSource:
    """Name the foreign tensors (as the files spell them) and the operation that make one native tensor."""

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
    """Return a source for each of `native`. `expected`: all names of the model, of which other ranks may load some."""
    weight_map = weight_map.for_names(available)
    stored_names = {weight_map.canonical(name): name for name in available}
    twins: dict[str, list[str]] = {}
    for alias, name in tied.items():
        twins.setdefault(name, []).append(alias)
    sources: list[TensorSource] = []
    missing: list[str] = []
    used: set[str] = set()
    for name in dict.fromkeys([*native, *expected]):
        # A tied tensor may be stored under either of its names, or under both.
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
        fix="check that config.json and the weights belong together, and that the model family is the right one",
        code="weights.model-mismatch",
    )


@torch.no_grad()
def fill(target: Tensor, source: TensorSource, shapes: Mapping[str, Shape], read: ReadBox, where: str) -> None:
    """Make one native tensor. Where the operation can, a rank reads only the bytes of its shard."""
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
    for box in boxes:
        tensor_of_chunk(target, box.offsets).copy_(tensor[box_slices(box.offsets, box.sizes)])


def shapes_fit(source: TensorSource, native: Shape, shapes: Mapping[str, Shape], where: str) -> None:
    """Raise, before any data is read, if foreign tensors do not make one of this shape."""
    try:
        shape = shape_of(source.op, [shapes[name] for name in source.foreign])
    except RuntimeError as error:
        sources = ", ".join(f"{name} {list(shapes[name])}" for name in source.foreign)
        raise TesseraError(
            f"{source.native} cannot be made from {sources}: {error}", where=where, code="weights.model-mismatch"
        ) from error
    if native != shape:
        raise TesseraError(
            f"{source.native} has shape {list(native)}, {' + '.join(source.foreign)} gives {list(shape)}",
            where=where,
            fix="check that config.json belongs to these weights",
            code="weights.shape-mismatch",
        )


@torch.no_grad()
def add_product(target: Tensor, b: Tensor, a: Tensor, scale: float) -> Tensor:
    """Add `scale` * b @ a, both unsharded, to a tensor that may be sharded. Each rank computes its own shard.

    Products of stacked matrices are computed one by one: all of them would be as large as the weights of all experts.
    """
    for box in local_chunks(target):
        *stacked, rows, columns = box_slices(box.offsets, box.sizes)
        shard = tensor_of_chunk(target, box.offsets)
        if not stacked:
            shard.copy_(shard.float() + scale * (b[rows].float() @ a[:, columns].float()))
            continue
        for part, part_b, part_a in zip(shard, b[stacked[0]], a[stacked[0]], strict=True):
            part.copy_(part.float() + scale * (part_b[rows].float() @ part_a[:, columns].float()))
    return target


_COMPARED = 16 << 20  # numbers of two tables that are compared at a time


def check_stored_kind(name: str, stored: str, wanted: torch.dtype, where: str) -> None:
    """Raise if a weight is stored as integers or a counter as floats: read as the other, its bytes mean nothing."""
    dtype = DTYPES.get(stored)
    if dtype is None or dtype.is_floating_point != wanted.is_floating_point:
        raise TesseraError(
            f"{name} is stored as {stored}, the model has {str(wanted).removeprefix('torch.')} there",
            where=where,
            fix="the file is damaged, or quantized in a way that is not read: fetch the weights in bf16, fp16 or fp32",
            code="weights.dtype-mismatch",
        )


def check_copies(weight_map: WeightMap, shapes: Mapping[str, Shape], read: ReadBox, where: str) -> None:
    """Raise if config.json ties two tables and the folder stores both with different numbers."""
    stored_names = {weight_map.canonical(name): name for name in shapes}
    for copied, native in weight_map.copies:
        match = weight_map.rule_for(native)
        if match is None or copied not in stored_names or match[1][0] not in stored_names:
            continue
        copy, other = stored_names[copied], stored_names[match[1][0]]
        check_copy(copy, other, shapes, read, where)


def check_copy(copy: str, other: str, shapes: Mapping[str, Shape], read: ReadBox, where: str) -> None:
    """Raise if `copy`, which must equal `other`, has different numbers."""
    if not same_numbers(copy, other, shapes, read):
        raise TesseraError(
            f"config.json ties the head to the embeddings, and {copy} differs from {other}",
            where=where,
            fix='set "tie_word_embeddings": false in config.json (inside of text_config, too, if it is there): the '
            "folder holds a head of its own",
            code="weights.tied-head-differs",
        )


def same_numbers(name: str, other: str, shapes: Mapping[str, Shape], read: ReadBox) -> bool:
    """Return whether two stored tensors are equal. They are read a few rows at a time."""
    shape = shapes[name]
    if shape != shapes[other]:
        return False
    rows = max(1, _COMPARED // max(1, math.prod(shape[1:])))
    for start in range(0, shape[0], rows):
        box = ((start, *[0] * (len(shape) - 1)), (min(rows, shape[0] - start), *shape[1:]))
        if not torch.equal(read(name, *box), read(other, *box)):
            return False
    return True


# Numbers of layers, as configurations call them: each layer is built, and has a tensor at least.
_LAYERS = frozenset(
    {"num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth", "depths", "layers", "encoder_layers"}
    | {"decoder_layers", "num_encoder_layers", "num_decoder_layers"}
)
_LAYERS_ANYWAY = 4096  # so many are built in a moment, and a misfit is then reported by names
_LARGEST = 1 << 53  # of any number in a configuration: beyond, not even its double is exact


def check_config_numbers(data: Mapping[str, Any], folder: Path) -> None:
    """Raise if a config.json has a number beyond all sense, or more layers than there are tensors."""
    most: int | None = None
    for name, number in _numbers(data, ""):
        if not math.isfinite(number) or abs(number) > _LARGEST:
            raise TesseraError(
                f"{name} = {str(number)[:30]} is beyond all sense",
                where=str(folder / "config.json"),
                code="model.absurd-size",
            )
        if name.rpartition(".")[2] not in _LAYERS or number <= _LAYERS_ANYWAY:
            continue
        if most is None:
            most = sum(1 for _ in _headers(folder))
        if number > most:
            raise TesseraError(
                f"{name} = {number}, and the weights are {most} tensors in all",
                where=str(folder / "config.json"),
                fix="check that config.json and the weights belong together",
                code="weights.fewer-than-layers",
            )


def check_folder_fit(
    folder: Path,
    tensors: Mapping[str, Tensor],
    weight_map: WeightMap,
    *,
    tied: Mapping[str, str],
) -> None:
    """Raise unless a folder fits a model that has no memory yet, by names, shapes and types in the headers."""
    headers = dict(_headers(folder))
    shapes = {name: shape for name, (shape, _) in headers.items()}
    sources = plan_reading(tensors.keys(), shapes, weight_map, tied=tied, expected=(), where=str(folder))
    for source in sources:
        shapes_fit(source, tuple(tensors[source.native].shape), shapes, str(folder))
        for name in source.foreign:
            check_stored_kind(name, headers[name][1], tensors[source.native].dtype, str(folder))


def _headers(folder: Path) -> Iterator[tuple[str, tuple[tuple[int, ...], str]]]:
    with FolderTensors(folder) as stored:
        for name, shape in stored.shapes.items():
            yield name, (shape, stored.kinds[name])


def _numbers(data: Any, name: str) -> Iterator[tuple[str, int | float]]:
    """Yield all numbers with their dotted names; those of a list have the name of the list."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield from _numbers(value, f"{name}.{key}".lstrip("."))
    elif isinstance(data, Sequence) and not isinstance(data, str):
        for value in data:
            yield from _numbers(value, name)
    elif isinstance(data, int | float) and not isinstance(data, bool):
        yield name, data
