"""The engine of `core.weightmap`: which foreign tensors make ours, what is missing and what is left over.

It knows rules and shapes, no files; `hf` joins it to folders.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.utils import find_tensor_shard

from tessera.core.errors import TesseraError, nearest
from tessera.core.weightmap import ByBox, Operation, WeightMap, can_read_boxes, shape_of

Shape = tuple[int, ...]
ReadBox = Callable[[str, Sequence[int], Sequence[int]], Tensor]  # (their name, offsets, sizes) -> that part of it


@dataclass(frozen=True)
class Recipe:
    """One tensor of ours: from which foreign tensors (names as they stand in the files), by which operation."""

    ours: str
    theirs: tuple[str, ...]
    op: Operation


def plan_reading(
    ours: Collection[str],
    available: Collection[str],
    weight_map: WeightMap,
    *,
    tied: Mapping[str, str],
    expected: Iterable[str],
    where: str,
) -> list[Recipe]:
    """A recipe for each of `ours`. `expected`: all names of the whole model, as what others load is not left over."""
    spelled = {weight_map.canonical(name): name for name in available}
    twins: dict[str, list[str]] = {}
    for alias, name in tied.items():
        twins.setdefault(name, []).append(alias)
    recipes: list[Recipe] = []
    missing: list[str] = []
    used: set[str] = set()
    for name in dict.fromkeys([*ours, *expected]):
        # A tied tensor may be stored under either of its names, or under both.
        found = None
        for candidate in (name, *twins.get(name, ())):
            match = weight_map.to_foreign(candidate)
            if match is None:
                continue
            rule, foreign = match
            used.update(foreign)
            if found is None and all(f in spelled for f in foreign):
                found = Recipe(name, tuple(spelled[f] for f in foreign), rule.op)
        if found is None:
            missing.append(name)
        elif name in ours:
            recipes.append(found)
    left_over = [spelled[f] for f in spelled if f not in used and not weight_map.skips(f)]
    if missing or left_over:
        raise _misfit(missing, left_over, weight_map, where)
    return recipes


def _misfit(missing: list[str], left_over: list[str], weight_map: WeightMap, where: str) -> TesseraError:
    lines: list[str] = []
    for name in missing[:10]:
        match = weight_map.to_foreign(name)
        wanted = ", ".join(match[1]) if match else "no rule of the weight map speaks of it"
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
    )


@torch.no_grad()
def fill(target: Tensor, recipe: Recipe, shapes: Mapping[str, Shape], read: ReadBox, where: str) -> None:
    """Makes one tensor of ours. Where the operation can, a rank reads only the bytes of what it holds."""
    shapes_fit(recipe, tuple(target.shape), shapes, where)
    theirs = [shapes[name] for name in recipe.theirs]
    boxes = _boxes(target)
    if can_read_boxes(recipe.op):
        assert isinstance(recipe.op, ByBox)
        for box in boxes:
            needed = recipe.op.boxes(box.offsets, box.sizes, theirs)
            pieces = [read(recipe.theirs[number], offsets, sizes) for number, offsets, sizes in needed]
            _shard(target, recipe.ours, box).copy_(recipe.op.joined(pieces, theirs))
        return
    if not boxes:
        return
    made = recipe.op.to_ours([read(name, [0] * len(shapes[name]), shapes[name]) for name in recipe.theirs])
    for box in boxes:
        _shard(target, recipe.ours, box).copy_(_cut(made, box.offsets, box.sizes))


def shapes_fit(recipe: Recipe, ours: Shape, shapes: Mapping[str, Shape], where: str) -> None:
    """Refuses foreign tensors that do not make one of this shape, before a byte of them is read."""
    try:
        made = shape_of(recipe.op, [shapes[name] for name in recipe.theirs])
    except RuntimeError as error:
        told = ", ".join(f"{name} {list(shapes[name])}" for name in recipe.theirs)
        raise TesseraError(f"{recipe.ours} cannot be made from {told}: {error}", where=where) from error
    if ours != made:
        raise TesseraError(
            f"{recipe.ours} has shape {list(ours)}, {' + '.join(recipe.theirs)} gives {list(made)}",
            where=where,
            fix="check that config.json belongs to these weights",
        )


def _cut(made: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    return made[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]


@torch.no_grad()
def add_product(target: Tensor, left: Tensor, right: Tensor, scale: float) -> Tensor:
    """Adds `scale` x left @ right, both whole, to a tensor that may be sharded. Each rank computes what it holds."""
    for box in _boxes(target):
        rows = slice(box.offsets[0], box.offsets[0] + box.sizes[0])
        columns = slice(box.offsets[1], box.offsets[1] + box.sizes[1])
        held = _shard(target, "", box)
        held.copy_(held.float() + scale * (left[rows].float() @ right[:, columns].float()))
    return target


def _boxes(target: Tensor) -> list[ChunkStorageMetadata]:
    """The parts of the whole tensor that this rank holds; torch's own checkpoint protocol answers for sharded ones."""
    chunks = getattr(target, "__create_chunk_list__", None)
    if chunks is not None:
        return [box for box in chunks() if 0 not in box.sizes]
    return [ChunkStorageMetadata(torch.Size([0] * target.dim()), target.shape)]


def _shard(target: Tensor, name: str, box: ChunkStorageMetadata) -> Tensor:
    return find_tensor_shard(target.detach(), MetadataIndex(name, box.offsets))


def foreign_entries(
    tensors: Mapping[str, Tensor], weight_map: WeightMap, dtype: torch.dtype | None
) -> Mapping[str, Tensor]:
    """What tensors of ours that belong together become on writing, as tensors without data: names, shapes and types."""
    blanks = {
        name: torch.empty(tensor.shape, dtype=cast_to(tensor, dtype), device="meta") for name, tensor in tensors.items()
    }
    return weight_map.theirs(blanks)


def cast_to(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Only weights change their type; counters and masks keep theirs."""
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
