"""Who works on which tokens and pictures: nothing is lost, nothing is done twice; what cannot be shared is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tessera
from tessera.core.errors import TesseraError
from tessera.core.run_config import ParallelSection
from tessera.core.types import Batch, Carry, ModelPlan, Segments, Stage
from tessera.parallel.axes import make_axes
from tessera.parallel.context.deal import Split, deal
from tessera.parallel.context.local_part import own_part
from tessera.parallel.context.ring import Course, Ring, own_segments
from tessera.parallel.context.ulysses import deal_heads
from tessera.parallel.plan import Plan
from tessera.parallel.planning.context import ContextPlan, TowerPart, plan_context

SPLITS = [Split(1, 1), Split(1, 2), Split(1, 3), Split(2, 1), Split(3, 1), Split(2, 2), Split(4, 2), Split(2, 2, 4)]


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("units", [16, 17, 23, 64])
def test_every_row_has_one_owner(split: Split, units: int) -> None:
    rows = units * split.unit
    owned = [row for at in range(split.ranks) for a, b in split.own(rows, at) for row in range(a, b)]
    assert sorted(owned) == list(range(rows))
    for at in range(split.ring):
        by_place = [split.own(rows, at * split.ulysses + place) for place in range(split.ulysses)]
        assert split.sizes(rows, at) == [sum(b - a for a, b in own) for own in by_place]
        joined = [row for own in by_place for a, b in own for row in range(a, b)]
        assert joined == [row for a, b in split.of_ring(rows, at) for row in range(a, b)]
    assert all(a % split.unit == b % split.unit == 0 for at in range(split.ranks) for a, b in split.own(rows, at))


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_the_least_rows_leave_nobody_without(split: Split) -> None:
    assert all(split.own(split.least, at) for at in range(split.ranks))


@pytest.mark.parametrize("ring", [2, 4])
def test_under_a_causal_mask_a_ring_has_equal_work(ring: int) -> None:
    split = Split(ring, 1)
    work = [sum(row + 1 for a, b in split.own(16 * ring, at) for row in range(a, b)) for at in range(ring)]
    assert len(set(work)) == 1


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [(24,), (5, 1, 9, 0, 7, 2), (1,) * 24, (11, 13)])
def test_rectangles_and_own_pieces_are_all_that_is_seen(causal: bool, lengths: tuple[int, ...]) -> None:
    """Marked pair by pair, against the mask of the whole row."""
    segments, split = Segments.of(lengths), Split(3, 1)
    ranges = [split.of_ring(24, at) for at in range(3)]
    rows = [[row for a, b in own for row in range(a, b)] for own in ranges]
    seen = torch.zeros(24, 24, dtype=torch.int64)
    for at in range(3):
        course = Course(Ring(None, 3, at), ranges, lengths, causal, 1.0)  # type: ignore[arg-type]
        pieces = own_segments(segments, ranges[at])
        assert pieces.bounds.diff().tolist() == list(pieces.lengths)
        assert pieces.longest == max(pieces.lengths)
        start = 0
        for length in pieces.lengths:
            for q in range(start, start + length):
                for k in range(start, q + 1 if causal else start + length):
                    seen[rows[at][q], rows[at][k]] += 1
            start += length
        for owner in set(range(3)) - {at}:
            for queries, keys in course.rectangles(owner):
                for q in rows[at][queries]:
                    for k in rows[owner][keys]:
                        seen[q, k] += 1
    piece = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = piece.unsqueeze(0) == piece.unsqueeze(1)
    assert torch.equal(seen, (mask.tril() if causal else mask).long())


def test_heads_are_dealt_with_the_keys_they_read() -> None:
    assert deal_heads(4, 2, 2).keys == ((0,), (1,))
    assert deal_heads(4, 1, 4).keys == ((0,),) * 4  # fewer keys than ranks: each gets a copy
    assert deal_heads(3, 3, 2) == deal_heads(3, 3, 2).__class__((1, 2), ((0,), (1, 2)))
    assert deal_heads(8, 2, 3).keys == ((0,), (0, 0, 1), (1,))  # two and one: a key for each query
    for heads, keys, ranks in ((12, 2, 8), (28, 4, 3), (6, 2, 4)):
        hands = deal_heads(heads, keys, ranks)
        assert sum(hands.queries) == heads
        assert max(hands.queries) - min(hands.queries) <= 1


def test_pieces_are_dealt_evenly_and_in_order() -> None:
    lengths = [8, 100, 12, 40, 60, 12]
    hands = deal(lengths, 2)
    assert sorted(number for hand in hands for number in hand) == list(range(6))
    assert all(hand == sorted(hand) for hand in hands)
    loads = [sum(lengths[n] for n in hand) for hand in hands]
    assert max(loads) - min(loads) <= 16
    assert deal([], 2) == [[], []]
    assert deal([4], 3) == [[0], [], []]


# ---------------------------------------------------------------------------------------------- batches

PIECES = (8, 4, 12, 4)


def batch(pictures: bool = True) -> Batch:
    tokens = torch.arange(30)
    tensors = {"tokens": tokens, "labels": tokens + 1, "positions": tokens.repeat(3, 1)}
    segments = {"text": Segments.of([13, 17])}
    if pictures:
        rows = sum(PIECES)
        tensors["pixels"] = torch.arange(rows).float().unsqueeze(1).repeat(1, 5)
        tensors["patch_positions"] = torch.arange(rows).unsqueeze(1).repeat(1, 2)
        tensors["media_slots"] = torch.tensor([1, 2, 4, 14, 15, 16, 29])
        segments["vision"] = Segments.of(PIECES)
    return Batch(tensors, segments, counts={"tokens": 30})


def context(split: Split, dealt: int = 1, shared: bool = False) -> ContextPlan:
    inner = Split(split.ring, split.ulysses, 4) if shared else None
    tower = TowerPart("vision", "vision", None, dealt, inner, ())
    return ContextPlan((), split.ring, split.ulysses, 30, True, (tower,))


@pytest.mark.parametrize("split", [Split(1, 3), Split(2, 1), Split(2, 2)], ids=str)
def test_parts_of_a_batch_make_up_the_whole(split: Split) -> None:
    whole, plan = batch(), context(split, dealt=split.ranks)
    parts = [own_part(whole, plan, at, at) for at in range(split.ranks)]
    order = torch.cat([part["tokens"] for part in parts])
    assert sorted(order.tolist()) == list(range(30))
    for name in ("labels", "positions"):
        back = torch.cat([part[name] for part in parts], -1)
        assert torch.equal(back, whole[name].index_select(-1, order))
    for part in parts:
        assert part.segments["text"].lengths == (13, 17)
        slots = whole["media_slots"][part["media_rows"]]
        assert torch.equal(part["tokens"][part["media_slots"]], slots)  # tokens are numbered as they lie
    assert sorted(torch.cat([part["media_rows"] for part in parts]).tolist()) == list(range(7))


def gathered(parts: list[Batch], key: str) -> torch.Tensor:
    """As the hook on a tower does it, with pixels for features."""
    longest = parts[0].segments[key].longest
    padded = []
    for at, part in enumerate(parts):
        rows = part.segments[key].lengths[at]
        own = part["pixels"][:rows] if rows else torch.zeros(0, 5)
        padded.append(torch.cat([own, torch.full((longest - rows, 5), -1.0)]))
    return torch.cat(padded).index_select(0, parts[0][key])


@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_dealt_pieces_come_back_in_order(ranks: int) -> None:
    whole = batch()
    parts = [own_part(whole, context(Split(1, 1), dealt=ranks), 0, hand) for hand in range(ranks)]
    for part in parts:
        if "pixels" in part:
            assert part["pixels"].shape[0] == part["patch_positions"].shape[0] == sum(part.segments["vision"].lengths)
            assert set(part.segments["vision"].lengths) <= set(PIECES)
        else:
            assert "vision" not in part.segments
    assert sum("pixels" in part for part in parts) == min(ranks, len(PIECES))
    assert torch.equal(gathered(parts, "vision.dealt"), whole["pixels"])


@pytest.mark.parametrize("split", [Split(1, 2), Split(2, 1), Split(2, 2), Split(4, 2)], ids=str)
def test_shared_patches_come_back_in_order(split: Split) -> None:
    """With 8 ranks there are fewer groups of patches than chunks: a blank piece fills up, and is not seen again."""
    whole = batch()
    parts = [own_part(whole, context(split, shared=True), at, 0) for at in range(split.ranks)]
    assert all(part["pixels"].shape[0] and part["pixels"].shape[0] % 4 == 0 for part in parts)
    assert {sum(part.segments["vision"].lengths) for part in parts} == {sum(p["pixels"].shape[0] for p in parts)}
    assert torch.equal(gathered(parts, "vision.shared"), whole["pixels"])


def test_a_batch_without_pictures_has_empty_places_for_them() -> None:
    for plan in (context(Split(1, 2), dealt=2), context(Split(1, 2), shared=True)):
        part = own_part(batch(pictures=False), plan, 1, 1)
        assert part["media_slots"].shape == part["media_rows"].shape == (0,)
        assert "pixels" not in part
        key = "vision.shared" if plan.towers[0].split else "vision.dealt"
        assert part.segments[key].lengths == (0, 0)
        assert part[key].shape == (0,)


def test_a_batch_too_short_for_its_ranks_is_refused() -> None:
    with pytest.raises(TesseraError, match="too short"):
        own_part(batch(), context(Split(8, 2)), 0, 0)


# ---------------------------------------------------------------------------------------------- plans


def plan(world: int, **parallel: Any) -> Plan:
    recipe = {
        "model": {"family": "qwen2_vl", "preset": "quickstart"},
        "data": {"length": 64},
        "train": {"steps": 1},
        "parallel": parallel,
    }
    return tessera.plan(recipe, world=world)


def test_a_plan_wraps_the_text_and_deals_the_tower() -> None:
    made = plan(4, cp=4, ulysses=2).context
    assert made is not None
    assert (made.ring, made.ulysses) == (2, 2)
    assert list(made.attention) == [f"text.layers.{n}.attn.core" for n in range(4)]
    (tower,) = made.towers
    assert (tower.dealt, tower.split, tower.attention, tower.ends_with) == (4, None, (), "projector")
    shared = plan(4, cp=4, ulysses=2, towers={"vision": {"cp": 4}}).context
    assert shared is not None
    assert shared.towers[0].split == Split(2, 2, 4)  # four patches become one token
    assert shared.towers[0].dealt == 1
    assert shared.towers[0].attention == tuple(f"vision.blocks.{n}.attn.core" for n in range(3))
    assert plan(4).context is None


BAD = [
    (8, {"cp": 8}, r"8 ranks cannot trade the 4 heads in text[\s\S]*allowed: 1, 2, 4\n[\s\S]*parallel.ulysses=4"),
    (8, {"cp": 4, "tp": 2}, r"2 heads that each of tp=2 ranks has[\s\S]*allowed: 1, 2\n"),
    (64, {"cp": 64, "ulysses": 1}, r"64 tokens is too short[\s\S]*128 at least"),
]


@pytest.mark.parametrize(("world", "parallel", "why"), BAD, ids=str)
def test_what_cannot_be_shared_is_refused(world: int, parallel: dict[str, Any], why: str) -> None:
    with pytest.raises(TesseraError, match=why):
        plan(world, **parallel)


class Core(nn.Module):
    def __init__(self, causal: bool | None, window: tuple[int, int] | None = None) -> None:
        super().__init__()
        if causal is not None:
            self.causal = causal
        self.window = window


def plan_of(core: nn.Module, model_plan: ModelPlan, **parallel: Any) -> ContextPlan | None:
    section = ParallelSection(**parallel)
    module = nn.ModuleDict({"core": core})
    return plan_context(section, model_plan, module, make_axes(section, model_plan, section.cp * section.tp), 64)


def test_a_mask_that_a_ring_cannot_serve_is_refused_and_ulysses_offered() -> None:
    says = ModelPlan(("core",), {}, attention=("core",))
    for core, why in ((Core(True, (4, 0)), "core has a window"), (Core(None), r"core has a mask of its own \(Core\)")):
        with pytest.raises(TesseraError, match=why + r"[\s\S]*parallel.ulysses=2"):
            plan_of(core, says, cp=2, ulysses=1)
        assert plan_of(core, says, cp=2) is not None
    assert plan_of(Core(False), says, cp=2, ulysses=1) is not None


def test_a_family_that_does_not_name_its_attention_is_refused() -> None:
    with pytest.raises(TesseraError, match="does not say where its attention is"):
        plan_of(Core(True), ModelPlan(("core",), {}), cp=2)


def test_pieces_of_an_unknown_tower_are_not_dealt() -> None:
    """Over ranks that share rows each runs it on all pieces; over ranks that compute layers together that is wrong."""
    says = ModelPlan(
        ("core",), {}, attention=("core",), towers={"ear": "ear"}, stages=(Stage("ear", carry=Carry(1, 1)),)
    )
    made = plan_of(Core(True), says, cp=2)
    assert made is not None
    assert made.towers == ()
    with pytest.raises(TesseraError, match=r"pieces of tower 'ear'[\s\S]*allowed: vision"):
        plan_of(Core(True), says, tp=2, towers={"ear": {"tp": 1}})
