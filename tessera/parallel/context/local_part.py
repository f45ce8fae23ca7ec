"""From a whole micro-batch to the part of it that a rank works on. Runs on the host, in the loader's processes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tessera.core.types import Batch, Segments, trained_positions
from tessera.parallel.context.deal import Range, cut, deal, indices, local_places, places_when_gathered
from tessera.parallel.planning.context import ContextPlan, TowerPart, too_short

PER_TOKEN = ("tokens", "labels", "positions")  # tensors of a batch whose last axis is that of the tokens


def own_part(batch: Batch, plan: ContextPlan, position: int, hand: int) -> Batch:
    """What a rank at `position` of those that share rows, and `hand` of those that deal pictures, works on.

    Segments of tokens stay those of all: attention reaches over all of them. With towers, `media_slots` are places
    among the own tokens, and `media_rows` says which embedding goes to each.
    """
    tensors, segments = dict(batch.tensors), dict(batch.segments)
    tokens = tensors["tokens"].shape[-1]
    ranges = [(0, tokens)]
    if plan.split.ranks > 1:
        if tokens < plan.split.least:
            raise too_short(tokens, plan.split.least)
        ranges = plan.split.own(tokens, position)
        for name in PER_TOKEN:
            if name in tensors:
                tensors[name] = cut(tensors[name], ranges, -1)
        if "trained" in tensors:
            tensors["trained"] = trained_positions(tensors["labels"])
        tensors["token_index"] = indices(ranges)  # which of all tokens these are: a row may go on elsewhere
    if plan.media:
        slots = tensors.get("media_slots", torch.empty(0, dtype=torch.int64))
        tensors["media_slots"], tensors["media_rows"] = local_places(slots, ranges)
    for tower in plan.towers:
        _deal(tensors, segments, tower, hand)
        if tower.split is not None:
            _share(tensors, segments, tower, position)
    return replace(batch, tensors=tensors, segments=segments)


def _deal(tensors: dict[str, Tensor], segments: dict[str, Segments], tower: TowerPart, hand: int) -> None:
    """Whole pieces to each rank. One that gets none leaves it to its tower to run on a blank picture."""
    if tower.dealt == 1:
        return
    lengths = segments[tower.name].lengths if tower.name in segments else ()
    hands = deal(lengths, tower.dealt)
    ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
    ranges = [[(ends[n], ends[n + 1]) for n in numbers] for numbers in hands]
    _note(tensors, segments, tower.dealt_key, [indices(own) for own in ranges], ends[-1])
    if hands[hand]:
        _keep(tensors, tower, ranges[hand])
        segments[tower.name] = Segments.of([lengths[n] for n in hands[hand]])
        if tower.windows in segments:
            segments[tower.windows] = Segments.of(_inside(segments[tower.windows].lengths, ranges[hand]))
    else:
        segments.pop(tower.name, None)
        segments.pop(tower.windows, None)
        for name in _owned(tensors, tower):
            tensors.pop(name)


def _share(tensors: dict[str, Tensor], segments: dict[str, Segments], tower: TowerPart, position: int) -> None:
    """Parts of pieces to each rank. So few rows that a rank would have none are made more by a blank piece: either all
    ranks take part in a piece or none does."""
    split = tower.split
    assert split is not None
    lengths = segments[tower.name].lengths if tower.name in segments else ()
    rows = sum(lengths)
    if rows == 0:
        _note(tensors, segments, tower.shared_key, [indices([])] * split.ranks, 0)
        return
    if rows < split.least:
        for name in (tower.name, tower.windows):
            if name in segments:
                segments[name] = Segments.of((*segments[name].lengths, split.least - rows))
        for name in _owned(tensors, tower):
            blank = tensors[name].new_zeros(split.least - rows, *tensors[name].shape[1:])
            tensors[name] = torch.cat([tensors[name], blank])
    total = max(rows, split.least)
    by_rank = [indices(split.own(total, rank)) for rank in range(split.ranks)]
    _note(tensors, segments, tower.shared_key, by_rank, total)
    tensors[tower.shared_key] = tensors[tower.shared_key][:rows]
    _keep(tensors, tower, split.own(total, position))


def _keep(tensors: dict[str, Tensor], tower: TowerPart, ranges: Sequence[Range]) -> None:
    for name in _owned(tensors, tower):
        tensors[name] = cut(tensors[name], ranges, 0)


def _owned(tensors: dict[str, Tensor], tower: TowerPart) -> list[str]:
    return [name for name in tensors if tower.owns(name)]


def _inside(lengths: Sequence[int], ranges: Sequence[Range]) -> list[int]:
    """Of pieces that lie one after another, those within some ranges, which never cut a piece."""
    ends = list(itertools.accumulate(lengths, initial=0))
    starts = {start: number for number, start in enumerate(ends[:-1])}
    found: list[int] = []
    for start, end in ranges:
        number = starts[start]
        while number < len(lengths) and ends[number] < end:
            found.append(lengths[number])
            number += 1
    return found


def _note(
    tensors: dict[str, Tensor], segments: dict[str, Segments], key: str, by_rank: Sequence[Tensor], rows: int
) -> None:
    """What is needed to put features of all ranks in order again."""
    tensors[key] = places_when_gathered(by_rank, rows)
    segments[key] = Segments.of([len(own) for own in by_rank])
