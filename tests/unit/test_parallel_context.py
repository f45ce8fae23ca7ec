"""Which rank works on which tokens and images: none is lost or computed twice; what cannot be shared is refused."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch
from torch import nn

import tessera
from tessera.config.run_config import ParallelSection
from tessera.core.batch import Batch, Segments
from tessera.core.model_plan import ModelPlan, Stream
from tessera.models.text.decoder import TEXT_STREAM
from tessera.parallel.context_attention import Ring, RingSchedule, own_segments, shard_heads
from tessera.parallel.context_parallel import ContextPlan, plan_context
from tessera.parallel.mesh import make_axes
from tessera.parallel.plan import Plan
from tessera.parallel.sequence_sharding import (
    BatchSharding,
    EncoderSharding,
    SequenceSharding,
    assign_sequences,
    shard_batch,
)
from tessera.runtime.modules import AttentionCore
from tessera.workers import messages
from tests.errors import raises

SPLITS = [
    SequenceSharding(1, 1),
    SequenceSharding(1, 2),
    SequenceSharding(1, 3),
    SequenceSharding(2, 1),
    SequenceSharding(3, 1),
    SequenceSharding(2, 2),
    SequenceSharding(4, 2),
    SequenceSharding(2, 2, 4),
]


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("units", [16, 17, 23, 64])
def test_every_row_has_one_owner(split: SequenceSharding, units: int) -> None:
    rows = units * split.unit
    owned = [row for at in range(split.ranks) for a, b in split.ranges(rows, at) for row in range(a, b)]
    assert sorted(owned) == list(range(rows))
    for at in range(split.ring):
        by_place = [split.ranges(rows, at * split.ulysses + place) for place in range(split.ulysses)]
        assert split.sizes(rows, at) == [sum(b - a for a, b in own) for own in by_place]
        joined = [row for own in by_place for a, b in own for row in range(a, b)]
        assert joined == [row for a, b in split.ring_ranges(rows, at) for row in range(a, b)]
    assert all(a % split.unit == b % split.unit == 0 for at in range(split.ranks) for a, b in split.ranges(rows, at))


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_the_least_rows_leave_nobody_without(split: SequenceSharding) -> None:
    assert all(split.ranges(split.minimum, at) for at in range(split.ranks))


@pytest.mark.parametrize("ring", [2, 4])
def test_under_a_causal_mask_a_ring_has_equal_work(ring: int) -> None:
    split = SequenceSharding(ring, 1)
    work = [sum(row + 1 for a, b in split.ranges(16 * ring, at) for row in range(a, b)) for at in range(ring)]
    assert len(set(work)) == 1


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [(24,), (5, 1, 9, 0, 7, 2), (1,) * 24, (11, 13)])
def test_rectangles_and_own_segments_cover_the_mask_once(causal: bool, lengths: tuple[int, ...]) -> None:
    """Marked pair by pair, against the mask of the whole row."""
    segments, split = Segments.of(lengths), SequenceSharding(3, 1)
    ranges = [split.ring_ranges(24, at) for at in range(3)]
    rows = [[row for a, b in local for row in range(a, b)] for local in ranges]
    seen = torch.zeros(24, 24, dtype=torch.int64)
    for at in range(3):
        course = RingSchedule(Ring(None, 3, at), ranges, lengths, causal, 1.0)  # type: ignore[arg-type]
        local = own_segments(segments, ranges[at])
        assert local.bounds.diff().tolist() == list(local.lengths)
        assert local.longest == max(local.lengths)
        start = 0
        for length in local.lengths:
            for q in range(start, start + length):
                for k in range(start, q + 1 if causal else start + length):
                    seen[rows[at][q], rows[at][k]] += 1
            start += length
        for owner in set(range(3)) - {at}:
            for queries, keys in course.rectangles(owner):
                for q in rows[at][queries]:
                    for k in rows[owner][keys]:
                        seen[q, k] += 1
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = segment.unsqueeze(0) == segment.unsqueeze(1)
    assert torch.equal(seen, (mask.tril() if causal else mask).long())


def test_heads_are_assigned_with_the_keys_they_read() -> None:
    assert shard_heads(4, 2, 2).keys == ((0,), (1,))
    assert shard_heads(4, 1, 4).keys == ((0,),) * 4  # fewer keys than ranks: each gets a copy
    assert shard_heads(3, 3, 2) == shard_heads(3, 3, 2).__class__((1, 2), ((0,), (1, 2)))
    assert shard_heads(8, 2, 3).keys == ((0,), (0, 0, 1), (1,))  # two and one: a key for each query
    for heads, keys, ranks in ((12, 2, 8), (28, 4, 3), (6, 2, 4)):
        hands = shard_heads(heads, keys, ranks)
        assert sum(hands.queries) == heads
        assert max(hands.queries) - min(hands.queries) <= 1


def test_sequences_are_assigned_evenly_and_in_order() -> None:
    lengths = [8, 100, 12, 40, 60, 12]
    hands = assign_sequences(lengths, 2)
    assert sorted(number for hand in hands for number in hand) == list(range(6))
    assert all(hand == sorted(hand) for hand in hands)
    loads = [sum(lengths[n] for n in hand) for hand in hands]
    assert max(loads) - min(loads) <= 16
    assert assign_sequences([], 2) == [[], []]
    assert assign_sequences([4], 3) == [[0], [], []]


# ---------------------------------------------------------------------------------------------- batches

IMAGE_LENGTHS = (8, 4, 12, 4)
PATCHES = Stream(("pixels", "patch_positions"), "vision", module="vision", projector="projector", slots="media_slots")


def batch(pictures: bool = True) -> Batch:
    tokens = torch.arange(30)
    tensors = {"tokens": tokens, "labels": tokens + 1, "positions": tokens.repeat(3, 1)}
    segments = {"text": Segments.of([13, 17])}
    if pictures:
        rows = sum(IMAGE_LENGTHS)
        tensors["pixels"] = torch.arange(rows).float().unsqueeze(1).repeat(1, 5)
        tensors["patch_positions"] = torch.arange(rows).unsqueeze(1).repeat(1, 2)
        tensors["media_slots"] = torch.tensor([1, 2, 4, 14, 15, 16, 29])
        segments["vision"] = Segments.of(IMAGE_LENGTHS)
    return Batch(tensors, segments, counts={"tokens": 30})


def context(split: SequenceSharding, dp: int = 1, shared: bool = False) -> BatchSharding:
    inner = SequenceSharding(split.ring, split.ulysses, 4) if shared else None
    return BatchSharding(TEXT_STREAM, split, (EncoderSharding("vision", PATCHES, dp, inner),))


@pytest.mark.parametrize("split", [SequenceSharding(1, 3), SequenceSharding(2, 1), SequenceSharding(2, 2)], ids=str)
def test_parts_of_a_batch_make_up_the_whole(split: SequenceSharding) -> None:
    whole, plan = batch(), context(split, dp=split.ranks)
    parts = [shard_batch(whole, plan, at, {"vision": at}) for at in range(split.ranks)]
    order = torch.cat([part["tokens"] for part in parts])
    assert sorted(order.tolist()) == list(range(30))
    for name in ("labels", "positions"):
        back = torch.cat([part[name] for part in parts], -1)
        assert torch.equal(back, whole[name].index_select(-1, order))
    for part in parts:
        assert part.segments["text"].lengths == (13, 17)
        slots = whole["media_slots"][part["media_slots.sources"]]
        assert torch.equal(part["tokens"][part["media_slots"]], slots)  # tokens are numbered as they lie
    assert sorted(torch.cat([part["media_slots.sources"] for part in parts]).tolist()) == list(range(7))


def test_shapes_of_samples_stay_on_the_host_and_whole() -> None:
    whole = Batch(
        {"sample_index": torch.tensor([0] * 12 + [1] * 4), "latent_index": torch.tensor([2, 3, 5, 8, 13])},
        {"latents": Segments.of([12, 4])},
        shapes={"latents": ((3, 2, 2), (1, 2, 2))},
    )
    main = Stream(("sample_index",), "latents", positions=("latent_index",), index="element_index")
    here, there = socket.socketpair()
    with here, there:
        messages.send(here, whole)
        arrived = messages.receive(there)
    part = shard_batch(arrived.to("cpu"), BatchSharding(main, SequenceSharding(2, 1)), 1, {})
    assert part.shapes == whole.shapes
    assert part["element_index"].tolist() == list(range(4, 12))
    assert part["latent_index"].tolist() == [1, 4]  # elements 5 and 8 of the whole
    assert part["latent_index.sources"].tolist() == [2, 3]


def gathered(parts: list[Batch], key: str) -> torch.Tensor:
    """As the hook on an encoder does it, with pixels for features."""
    longest = parts[0].segments[key].longest
    padded = []
    for at, part in enumerate(parts):
        rows = part.segments[key].lengths[at]
        pixels = part["pixels"][:rows] if rows else torch.zeros(0, 5)
        padded.append(torch.cat([pixels, torch.full((longest - rows, 5), -1.0)]))
    return torch.cat(padded).index_select(0, parts[0][key])


@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_distributed_sequences_come_back_in_order(ranks: int) -> None:
    whole = batch()
    parts = [shard_batch(whole, context(SequenceSharding(1, 1), dp=ranks), 0, {"vision": at}) for at in range(ranks)]
    for part in parts:
        if "pixels" in part:
            assert part["pixels"].shape[0] == part["patch_positions"].shape[0] == sum(part.segments["vision"].lengths)
            assert set(part.segments["vision"].lengths) <= set(IMAGE_LENGTHS)
        else:
            assert "vision" not in part.segments
    assert sum("pixels" in part for part in parts) == min(ranks, len(IMAGE_LENGTHS))
    assert torch.equal(gathered(parts, "vision.dp"), whole["pixels"])


@pytest.mark.parametrize(
    "split", [SequenceSharding(1, 2), SequenceSharding(2, 1), SequenceSharding(2, 2), SequenceSharding(4, 2)], ids=str
)
def test_shared_patches_come_back_in_order(split: SequenceSharding) -> None:
    """With 8 ranks there are fewer groups of patches than chunks: a blank sequence fills up and is dropped later."""
    whole = batch()
    parts = [shard_batch(whole, context(split, shared=True), at, {}) for at in range(split.ranks)]
    assert all(part["pixels"].shape[0] and part["pixels"].shape[0] % 4 == 0 for part in parts)
    assert {sum(part.segments["vision"].lengths) for part in parts} == {sum(p["pixels"].shape[0] for p in parts)}
    assert torch.equal(gathered(parts, "vision.cp"), whole["pixels"])


def test_a_batch_without_pictures_has_empty_places_for_them() -> None:
    for plan in (context(SequenceSharding(1, 2), dp=2), context(SequenceSharding(1, 2), shared=True)):
        part = shard_batch(batch(pictures=False), plan, 1, {"vision": 1})
        assert part["media_slots"].shape == part["media_slots.sources"].shape == (0,)
        assert "pixels" not in part
        key = "vision.cp" if plan.encoders[0].split else "vision.dp"
        assert part.segments[key].lengths == (0, 0)
        assert part[key].shape == (0,)


def test_a_batch_too_short_for_its_ranks_is_refused() -> None:
    with raises("layout.row-too-short"):
        shard_batch(batch(), context(SequenceSharding(8, 2)), 0, {})


# ---------------------------------------------------------------------------------------------- plans


def plan(world: int, **parallel: Any) -> Plan:
    recipe = {
        "model": {"family": "qwen2_vl", "preset": "quickstart"},
        "data": {"length": 64},
        "train": {"steps": 1},
        "parallel": parallel,
    }
    return tessera.plan(recipe, world=world)


def test_a_plan_wraps_the_text_and_distributes_the_encoder() -> None:
    context = plan(4, cp=4, ulysses=2).layout.context
    assert context is not None
    assert context.sharding.split == SequenceSharding(2, 2)
    assert list(context.attention) == [f"text.layers.{n}.attn.core" for n in range(4)]
    (encoder,) = context.sharding.encoders
    assert (encoder.dp, encoder.split, encoder.attention) == (4, None, ())
    shared = plan(4, cp=4, ulysses=2, encoders={"vision": {"cp": 4}}).layout.context
    assert shared is not None
    (encoder,) = shared.sharding.encoders
    assert encoder.split == SequenceSharding(2, 2, 4)  # four patches become one token
    assert encoder.dp == 1
    assert encoder.attention == tuple(f"vision.blocks.{n}.attn.core" for n in range(3))
    assert plan(4).layout.context is None


BAD = [
    (8, {"cp": 8}, "layout.ulysses-heads parallel.ulysses=4"),
    (8, {"cp": 4, "tp": 2}, "layout.ulysses-heads tp=2"),
    (64, {"cp": 64, "ulysses": 1}, "layout.row-too-short 64 128"),
]


@pytest.mark.parametrize(("world", "parallel", "error"), BAD, ids=str)
def test_what_cannot_be_shared_is_refused(world: int, parallel: dict[str, Any], error: str) -> None:
    with raises(error):
        plan(world, **parallel)


class Core(AttentionCore):
    def __init__(self, causal: bool | None, window: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.causal, self.window = causal, window


def plan_of(core: nn.Module, model_plan: ModelPlan, **parallel: Any) -> ContextPlan | None:
    section = ParallelSection(**parallel)
    module = nn.ModuleDict({"core": core})
    return plan_context(section, model_plan, module, make_axes(section, model_plan, section.cp * section.tp), 64)


def test_a_mask_that_a_ring_cannot_serve_is_refused_and_ulysses_offered() -> None:
    says = ModelPlan(("core",), {}, streams={"text": TEXT_STREAM}, attention=("core",))
    for core, why in (
        (Core(True, (4, 0)), "window"),
        (Core(None), "(Core)"),
        (nn.Identity(), "(Identity)"),
    ):
        with raises("layout.ring-attention-kind", "core", why, "parallel.ulysses=2"):
            plan_of(core, says, cp=2, ulysses=1)
        assert plan_of(core, says, cp=2) is not None
    assert plan_of(Core(False), says, cp=2, ulysses=1) is not None


def test_a_family_that_does_not_name_its_attention_is_refused() -> None:
    with raises("layout.attention-not-declared"):
        plan_of(Core(True), ModelPlan(("core",), {}), cp=2)


def test_a_family_that_does_not_describe_its_main_sequence_is_refused() -> None:
    with raises("layout.stream-not-declared"):
        plan_of(Core(True), ModelPlan(("core",), {}, attention=("core",)), cp=2)


def test_several_encoders_are_distributed_each_in_its_own_way() -> None:
    frames = Stream(("frames",), "audio", module="audio", projector="ear", slots="audio_slots")
    plan = BatchSharding(
        TEXT_STREAM,
        SequenceSharding(1, 2),
        (
            EncoderSharding("vision", PATCHES, dp=2),
            EncoderSharding("audio", frames, split=SequenceSharding(1, 2)),
        ),
    )
    whole = batch()
    whole.tensors |= {"frames": torch.arange(6).float().unsqueeze(1), "audio_slots": torch.tensor([0, 20, 21])}
    whole.segments["audio"] = Segments.of([6])
    parts = [shard_batch(whole, plan, at, {"vision": at}) for at in range(2)]
    assert [part["frames"].flatten().tolist() for part in parts] == [[0, 1, 2], [3, 4, 5]]
    assert [part["audio_slots.sources"].tolist() for part in parts] == [[0], [1, 2]]
    assert sum(part["pixels"].shape[0] for part in parts) == sum(IMAGE_LENGTHS)
    assert sorted(length for part in parts for length in part.segments["vision"].lengths) == sorted(IMAGE_LENGTHS)
