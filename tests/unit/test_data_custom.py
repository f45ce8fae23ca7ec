"""A user's own data sets and loaders: real torch objects, unchanged, as rows; and training on them."""

from __future__ import annotations

import json
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from data_cases import LetterProcessor, row

import tessera
from tessera.config.run_config import DataSection, ParallelSection
from tessera.core.batch import Batch
from tessera.core.model_plan import ModelPlan
from tessera.core.row_source import RowSource
from tessera.core.sample import Encoded, Message, Part, Sample
from tessera.data.kinds import KINDS, RowRequest
from tessera.data.loader.loader import Loader
from tessera.errors import TesseraError
from tessera.parallel.mesh import make_axes
from tessera.parallel.sequence_sharding import RankDataset
from tests.errors import raises
from tests.toys import own_data

TOYS = "tests.toys.own_data"


def rows(seed: int = 0, cache: Path | None = None, split: Any = "train", processor: Any = None, **options: Any) -> Any:
    section = DataSection(kind="custom", options=options, length=64)
    return KINDS.get("custom")(RowRequest(section, split, processor, seed, cache))


def chats(*items: Any, **section: Any) -> RowSource:
    options = {"dataset": f"{TOYS}:Chats", "arguments": {"items": list(items)}}
    data_section = DataSection(kind="custom", options=options, length=64, shuffle=False, **section)
    return KINDS.get("custom")(RowRequest(data_section, "train", LetterProcessor(), 0))


def ids(source: RowSource, numbers: range, micro: int = 1) -> list[str]:
    ids_read = [source.batch(list(range(n, n + micro))).sample_ids for n in numbers[::micro]]
    return [one for batch in ids_read for one in batch]


# ---------------------------------------------------------------------------------------------- by number


def test_items_come_in_an_order_that_is_a_function_of_seed_and_row() -> None:
    source = rows(dataset=f"{TOYS}:Digits", arguments={"count": 30})
    assert len(source) == 30
    everything = [f"digit-{n}" for n in range(30)]
    passes = [ids(source, range(first, first + 30)) for first in (0, 30)]
    assert sorted(passes[0]) == sorted(passes[1]) == sorted(everything)
    assert passes[0] != passes[1] != everything
    assert ids(rows(dataset=f"{TOYS}:Digits", arguments={"count": 30}), range(60), 6) == passes[0] + passes[1]
    assert ids(rows(1, dataset=f"{TOYS}:Digits", arguments={"count": 30}), range(30)) != passes[0]
    far = 30 * 10**12
    assert sorted(ids(source, range(far, far + 30))) == sorted(everything)

    batch = source.batch([7, 3])
    assert batch["pixels"].shape == (2, 64)
    assert batch.rows == ((7, 1), (3, 1))
    assert batch.counts == {"samples": 2}
    assert len(set(batch.seeds)) == 2


def test_noise_in_items_belongs_to_the_row_and_not_to_the_process() -> None:
    source = rows(dataset=f"{TOYS}:Digits", arguments={"noise": 1.0})
    travelled = pickle.loads(pickle.dumps(source))  # noqa: S301 - our own object, as a spawned worker gets it
    before = torch.get_rng_state()
    first = source.batch([5])["pixels"]
    assert torch.equal(torch.get_rng_state(), before)  # the process's own streams go on as if nothing had been drawn
    random.seed(99)
    torch.manual_seed(99)
    assert torch.equal(travelled.batch([5])["pixels"], first)
    assert not torch.equal(source.batch([5 + 48])["pixels"].sort().values, first.sort().values)


def test_a_ready_object_tuples_with_names_and_a_collate_function() -> None:
    assert len(rows(dataset=f"{TOYS}:DIGITS")) == 10
    batch = rows(dataset=f"{TOYS}:Pairs", fields=["pixels", "labels"]).batch([0, 1, 2])
    assert set(batch.tensors) == {"pixels", "labels"}
    assert batch["labels"].dtype == torch.int64
    batch = rows(dataset=f"{TOYS}:Digits", collate_fn=f"{TOYS}:keyed").batch([0, 1, 2])
    assert batch["count"].tolist() == [3]
    assert len(batch.sample_ids) == 3


def test_conversations_of_every_kind() -> None:
    sample = Sample("mine", (Message("user", (Part("text", "ab"),)), Message("assistant", (Part("text", "cd"),))))
    encoded = LetterProcessor().encode(sample, [])
    source = chats(sample, row("ab", "cd"), {"instruction": "ab", "output": "cd"}, encoded)
    batches = [source.batch([n]) for n in range(4)]
    assert all(torch.equal(batch["tokens"], batches[0]["tokens"]) for batch in batches)
    assert [batch.sample_ids for batch in batches] == [("mine",), ("1",), ("2",), ("mine",)]
    assert source.batch([0, 1]).counts["trained"] == 4
    visible = rows(processor=LetterProcessor(), dataset=f"{TOYS}:Chats", arguments={"pictures": 2}).batch([0])
    assert visible.counts["images"] == 1
    whole = Batch({"x": torch.zeros(1)}, sample_ids=("whole",))
    assert chats(whole).batch([0]).sample_ids == ("whole",)
    with raises("data.batches-as-items", "train.micro_batch"):
        chats(whole, whole).batch([0, 1])


def test_bad_conversations_leave_a_hole_or_end_the_run() -> None:
    good, bad = row("ab", "cd", id="good"), row("<image>", "cd", id="bad", images=[])
    long = Encoded("long", torch.zeros(99, dtype=torch.int64), torch.zeros(99, dtype=torch.int64), torch.arange(99))
    batch = chats(good, bad, long).batch([0, 1, 2])
    assert batch.sample_ids == ("good", "bad", "long")
    assert [bad.code for bad in batch.problems] == ["data.placeholder-count", "data.sample-too-long"]
    with raises("data.bad-sample"):
        chats(good, bad, on_bad_sample="fail").batch([1])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "data.dataset-or-loader"),
        ({"dataset": f"{TOYS}:Digits", "loader": f"{TOYS}:digit_loader"}, "data.dataset-or-loader"),
        ({"datasett": "x"}, "unknown key: datasett (did you mean dataset?)"),
        ({"zzz": "x"}, "unknown key: zzz\n"),
        ({"dataset": "tests.toys"}, "not an import path"),
        ({"dataset": "no.such:thing"}, "cannot import no.such"),
        ({"dataset": f"{TOYS}:Digitz"}, "did you mean: Digits"),
        ({"dataset": f"{TOYS}:Digits", "arguments": {"cuont": 3}}, "unexpected keyword argument 'cuont'"),
        ({"dataset": f"{TOYS}:DIGITS", "arguments": {"count": 3}}, "cannot be called with arguments"),
        ({"dataset": f"{TOYS}:Digits", "arguments": {"count": 0}}, "is empty"),
        ({"dataset": f"{TOYS}:TOYS"}, "has no attribute"),
        ({"dataset": "math:pi"}, "standard library"),
        ({"dataset": f"{TOYS}:WIDTH"}, "a int, which is not a dataset"),
        ({"dataset": f"{TOYS}:Digits", "fields": "pixels"}, "fields: "),
        ({"dataset": f"{TOYS}:Digits", "columns": {"mesages": "x"}}, "did you mean: messages"),
    ],
)
def test_options_that_are_wrong(options: dict[str, Any], said: str) -> None:
    with pytest.raises(TesseraError) as raised:
        rows(**options)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("items", "error"),
    [
        (["hello"], "data.unknown-item-type tests.toys.own_data:Chats"),
        ([(torch.zeros(1), 2)], "data.unknown-item-type"),
        ([{"a": "words"}], "data.unknown-item-type"),
        ([{}], "data.unknown-item-type"),
        ([{"a": torch.zeros(2)}, {"a": torch.zeros(3)}], "data.items-not-stackable"),
        ([row("a", "b"), {"a": torch.zeros(2)}], "data.bad-sample"),
    ],
)
def test_items_that_are_something_else_say_what_is_known(items: list[Any], error: str) -> None:
    with raises(error) as raised:
        chats(*items, on_bad_sample="fail").batch(list(range(len(items))))
    if len(items) == 1:
        assert "a dict of tensors" in (raised.value.allowed or [])


def test_errors_of_the_data_set_name_the_item() -> None:
    source = rows(dataset=f"{TOYS}:Chats", arguments={"items": [1]})
    source._data.items = {}
    source._data.__class__ = type("Broken", (own_data.Chats,), {"__len__": lambda self: 1})
    with raises("data.item-fails", "tests.toys.own_data:Chats", "KeyError"):
        source.batch([0])


# ---------------------------------------------------------------------------------------------- in its own order


def test_a_stream_is_numbered_and_wraps_around() -> None:
    source = rows(dataset=f"{TOYS}:DigitStream")
    assert ids(source, range(25)) == [f"digit-{n % 20}" for n in range(25)]
    assert source.batch([31, 34]).sample_ids == ("digit-11", "digit-14")
    assert source.batch([2]).sample_ids == ("digit-2",)  # back: it begins again


def test_a_loader_is_taken_as_it_is() -> None:
    source = rows(loader=f"{TOYS}:digit_loader")
    assert len(source) == 12
    straight = [source.batch([n]).sample_ids for n in range(30)]
    assert all(len(batch) == 4 for batch in straight)
    for first in (0, 12):
        assert len({one for batch in straight[first : first + 12] for one in batch}) == 48
    assert straight[:12] != straight[12:24]
    torch.manual_seed(5)
    again = rows(loader=f"{TOYS}:digit_loader")  # as after a resume, and as another rank
    assert [again.batch([n]).sample_ids for n in (17, 18, 25)] == [straight[n] for n in (17, 18, 25)]
    assert source.batch([0]).rows == ((0, 4),)
    with raises("data.loader-makes-batches"):
        source.batch([0, 1])


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_ranks_take_the_batches_of_a_loader_in_turn(workers: int) -> None:
    first = rows(loader=f"{TOYS}:digit_loader", arguments={"count": 24, "workers": workers})
    with Loader(first, global_batch=4) as whole:
        expected = [batch.sample_ids for _ in range(3) for batch in next(whole)]
    results: list[Any] = [None] * 12
    for rank in range(2):
        source = rows(loader=f"{TOYS}:digit_loader", arguments={"count": 24, "workers": workers})
        with Loader(source, global_batch=4, rank=rank, ranks=2) as mine:
            results[rank::2] = [batch.sample_ids for _ in range(3) for batch in next(mine)]
    assert results == expected


@pytest.mark.parametrize(
    ("parallel", "world", "data_ranks"),
    [
        ({"tp": 2}, 2, [0, 0]),
        pytest.param({"cp": 2}, 4, [0, 0, 1, 1], marks=pytest.mark.slow),
        pytest.param({"pp": 2}, 4, [0, 1, 0, 1], marks=pytest.mark.slow),
        ({}, 2, [0, 1]),
    ],
    ids=["tp", "cp", "pp", "data"],
)
def test_a_distributed_sampler_must_mean_the_ranks_that_read_different_rows(
    parallel: dict[str, Any], world: int, data_ranks: list[int]
) -> None:
    axes = make_axes(ParallelSection(**parallel), ModelPlan(blocks=(), tensor={}), world)
    count = max(data_ranks) + 1
    for rank in range(world):
        RankDataset(
            rows(loader=f"{TOYS}:ranked_loader", arguments={"rank": data_ranks[rank], "ranks": count}), axes, rank
        )
        RankDataset(rows(loader=f"{TOYS}:digit_loader"), axes, rank)  # without a sampler there is nothing to mistake
        if parallel:  # what torch's own default would be
            all_ranks = rows(loader=f"{TOYS}:ranked_loader", arguments={"rank": rank, "ranks": world})
            with raises("data.sampler-ranks-differ", str(count), str(data_ranks[rank])) as refusal:
                RankDataset(all_ranks, axes, rank)
            assert refusal.value.exit_code == 2


def test_a_distributed_sampler_keeps_its_ranks() -> None:
    seen: list[str] = []
    for rank in range(2):
        source = rows(loader=f"{TOYS}:ranked_loader", arguments={"rank": rank, "ranks": 2})
        assert len(source) == 12
        with Loader(source, global_batch=4, rank=rank, ranks=2) as mine:
            batches = [batch.sample_ids for _ in range(6) for batch in next(mine)]
        late = rows(loader=f"{TOYS}:ranked_loader", arguments={"rank": rank, "ranks": 2})
        with Loader(late, global_batch=4, rank=rank, ranks=2, start_row=16) as resumed:
            assert [batch.sample_ids for batch in next(resumed)] == batches[8:10]
        assert batches[:6] != batches[6:12]
        seen += [one for batch in batches[:6] for one in batch]
    assert sorted(seen) == sorted(f"digit-{n}" for n in range(48))


@pytest.mark.parametrize(
    ("key", "name", "right"), [("dataset", "digit_loader", "loader"), ("loader", "Digits", "dataset")]
)
def test_a_loader_is_no_data_set_nor_the_reverse(key: str, name: str, right: str) -> None:
    """Batches as samples would be stacked; with a `DistributedSampler`, ranks would leave half of them out."""
    with pytest.raises(TesseraError) as refused:
        rows(**{key: f"{TOYS}:{name}"})
    assert refused.value.where == f"data.options.{key}"
    assert f"data.options.{right}={TOYS}:{name}" in str(refused.value.fix)


# ---------------------------------------------------------------------------------------------- training


def recipe(out: Path, name: str, options: dict[str, Any], **train: Any) -> dict[str, Any]:
    return {
        "name": name,
        "out": str(out),
        "model": {"family": "module", "config": {"class": "tests.toys.own_models:PlainNet"}},
        "data": {"kind": "custom", "options": options, "workers": train.pop("workers", 0)},
        "train": {"steps": 6, "global_batch": 8, "micro_batch": 4, "device": "cpu", **train},
        "optim": {"lr": 1e-2, "schedule": {"kind": "constant"}},
        "checkpoint": {"every": 2},
        "log": {"every": 1},
    }


def test_a_data_kind_that_gives_no_source_of_rows_is_refused(tmp_path: Path) -> None:
    recipe_of_run = recipe(tmp_path, "kind", {})
    recipe_of_run["data"]["kind"] = f"{TOYS}:rows_of_no_source"
    with raises("data.no-row-source") as raised:
        tessera.train(recipe_of_run)
    assert raised.value.where == "data.kind"


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]


def seen(folder: Path) -> list[list[str]]:
    (file,) = (folder / "ledger").glob("*.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [[str(one) for one in line["samples"]] for line in lines]


@pytest.mark.parametrize(
    ("options", "train"),
    [
        pytest.param({"dataset": f"{TOYS}:Digits", "arguments": {"noise": 0.1}}, {}, marks=pytest.mark.slow),
        ({"loader": f"{TOYS}:digit_loader"}, {"global_batch": 2, "micro_batch": 1}),
        pytest.param({"dataset": f"{TOYS}:DigitStream"}, {}, marks=pytest.mark.slow),
    ],
    ids=["dataset", "loader", "stream"],
)
def test_training_goes_on_where_it_stood(tmp_path: Path, options: dict[str, Any], train: dict[str, Any]) -> None:
    whole = tessera.train(recipe(tmp_path, "whole", options, **train))
    tessera.train(recipe(tmp_path, "parts", options, **train, steps=4))
    parts = tessera.resume(tmp_path / "parts", {"train.steps": 6})
    assert losses(whole.folder) == losses(parts.folder)
    assert seen(whole.folder) == seen(parts.folder)
    assert len(losses(whole.folder)) == 6


@pytest.mark.parametrize(
    ("options", "train"),
    [
        ({"dataset": f"{TOYS}:Digits", "arguments": {"noise": 0.1}}, {}),
        pytest.param(
            {"loader": f"{TOYS}:digit_loader", "arguments": {"workers": 1}},
            {"global_batch": 2, "micro_batch": 1},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["dataset", "loader"],
)
def test_worker_processes_make_the_same_batches(tmp_path: Path, options: dict[str, Any], train: dict[str, Any]) -> None:
    here = tessera.train(recipe(tmp_path, "here", options, **train, steps=3))
    there = tessera.train(recipe(tmp_path, "there", options, **train, steps=3, workers=2))
    assert losses(here.folder) == losses(there.folder)


@pytest.mark.slow
def test_held_out_data_of_its_own(tmp_path: Path) -> None:
    options = {
        "dataset": f"{TOYS}:Digits",
        "arguments": {"count": 40},
        "eval": {"dataset": f"{TOYS}:Pairs", "fields": ["pixels", "labels"]},
    }
    run = tessera.train(recipe(tmp_path, "held", options, steps=2))
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines].count("eval") == 1
    with raises("data.no-held-out-data"):
        rows(split="eval", dataset=f"{TOYS}:Digits")
