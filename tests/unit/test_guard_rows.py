"""Samples to blame are passed over by every kind of rows that can: after a rollback training goes on without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tessera
from tessera.config.run_config import load_config
from tessera.core.batch import Batch
from tessera.parallel.engine import SimpleEngine
from tessera.runtime.files import read_jsonl
from tessera.tasks.dpo import DpoTask
from tessera.training.build import build_processor, build_rows
from tessera.training.records import read_ledger
from tessera.training.setup import build_meta_model
from tests.toys.pair_set import pair_recipe, write_pair_set
from tests.unit.data_cases import row
from tests.unit.test_data_custom import TOYS, chats, recipe, rows
from tests.unit.test_preference import model_with_adapters

WHY = "bad numbers"


def without(source: Any, *names: str) -> Any:
    rest = source.without(dict.fromkeys(names, WHY))
    assert rest is not None
    return rest


# ---------------------------------------------------------------------------------------------- items of own data


def test_a_conversation_leaves_a_masked_hole() -> None:
    plain: Any = chats(row("ab", "cd", id="one"), row("ef", "gh"), row("ij", "kl", id="three"), on_bad_sample="fail")
    batch = without(without(plain, "1"), "three").batch([0, 1, 2])
    assert batch.sample_ids == ("one", "1", "three")
    assert [bad.id for bad in batch.problems] == ["1", "three"]
    assert {bad.code for bad in batch.problems} == {"data.sample-excluded"}
    whole = plain.batch([0, 1, 2])
    assert torch.equal(batch["tokens"][:64], whole["tokens"][:64])
    assert batch.counts["trained"] == plain.batch([0]).counts["trained"] > 0
    assert plain.batch([1]).problems == ()  # rows that others hold are as they were


def test_tensors_are_left_out_of_their_micro_batch() -> None:
    plain = rows(dataset=f"{TOYS}:Digits", arguments={"count": 6, "noise": 0.5})
    whole = plain.batch([0, 1, 2])
    bad = whole.sample_ids[1]
    batch = without(plain, bad).batch([0, 1, 2])
    assert batch.sample_ids == (whole.sample_ids[0], whole.sample_ids[2])
    assert batch.rows == ((0, 1), (1, 0), (2, 1))
    assert [(bad.id, WHY in bad.reason) for bad in batch.problems] == [(bad, True)]
    assert batch.counts == {"samples": 2}
    assert torch.equal(batch["pixels"], whole["pixels"][[0, 2]])  # the others have the noise that they had


def test_nothing_takes_the_place_of_a_micro_batch() -> None:
    plain = rows(dataset=f"{TOYS}:Digits", arguments={"count": 6})
    bad = plain.batch([4]).sample_ids[0]
    assert without(plain, bad).batch([4]).sample_ids == (bad,)  # the guard skips the step


def test_names_of_tuples_of_a_collate_function_and_of_whole_batches() -> None:
    tuples = rows(dataset=f"{TOYS}:Pairs", fields=["pixels", "labels"])
    names = tuples.batch([0, 1]).sample_ids
    assert without(tuples, names[0]).batch([0, 1]).sample_ids == names[1:]
    collated = rows(dataset=f"{TOYS}:Digits", collate_fn=f"{TOYS}:keyed")
    names = collated.batch([0, 1, 2]).sample_ids
    batch = without(collated, names[2]).batch([0, 1, 2])
    assert batch.sample_ids == names[:2]
    assert batch["count"].tolist() == [2]
    batches = chats(*(Batch({"x": torch.full((1,), n)}, sample_ids=(f"{n}a", f"{n}b")) for n in range(3)))
    assert without(batches, "1a").batch([1])["x"] == 1  # the other sample of it is good
    assert without(batches, "1a", "1b").batch([1])["x"] == 1  # nothing else is in this micro-batch


@pytest.mark.parametrize(
    "options", [{"loader": f"{TOYS}:digit_loader"}, {"dataset": f"{TOYS}:DigitStream"}], ids=["loader", "stream"]
)
def test_what_only_goes_forward_leaves_nothing_out(options: dict[str, Any]) -> None:
    assert rows(**options).without({}) is None


# ---------------------------------------------------------------------------------------------- pairs


def test_a_pair_leaves_a_hole_and_a_row_of_holes_trains_nothing(tmp_path: Path) -> None:
    config = load_config(pair_recipe(write_pair_set(tmp_path / "pairs"), tmp_path))
    setup = build_meta_model(config, 1)
    source: Any = build_rows(config, setup, "train", build_processor(config, setup))
    whole = source.batch([0, 1])
    assert whole.counts["pairs"] > 1
    batch = without(source, whole.sample_ids[0]).batch([0, 1])
    assert batch.sample_ids == whole.sample_ids
    assert batch.counts["pairs"] == whole.counts["pairs"] - 1
    others = whole["pair"] >= 2
    assert torch.equal(batch["pair"] >= 0, others)  # they lie where they were
    assert torch.equal(batch["tokens"][others], whole["tokens"][others])
    module = model_with_adapters(setup)
    empty = without(source, *whole.sample_ids).batch([0, 1])
    out = SimpleEngine(module).step(DpoTask(), [empty])
    assert float(out.counts["pairs"]) == float(out.loss()) == 0
    assert all(p.grad is None or not p.grad.any() for p in module.parameters())


# ---------------------------------------------------------------------------------------------- runs


def told(run: tessera.Run) -> list[dict[str, Any]]:
    return list(read_jsonl(run.folder / "guard.jsonl"))


def test_own_data_goes_back_and_on_without_it(tmp_path: Path) -> None:
    options = {"dataset": f"{TOYS}:Spoiled", "arguments": {"bad": [11]}}
    settings = recipe(tmp_path, "own", options, steps=8, micro_batch=4)
    run = tessera.train({**settings, "guard": {"policy": "rollback"}})
    (event,) = told(run)
    assert (event["action"], event["samples"], event["ambiguous"]) == ("went back", ["digit-11"], False)
    seen = [name for found in read_ledger(run.folder).values() for _, names in found for name in names]
    assert "digit-11" not in seen
    assert len(set(seen)) == 47
    assert [row["id"] for row in read_jsonl(run.folder / "quarantine.jsonl")] == ["digit-11"]
    losses = [row["loss"] for row in run.metrics if row["kind"] == "train"]
    assert len(losses) == 8
    assert all(loss == loss for loss in losses)


def test_alone_in_its_micro_batch_a_sample_costs_the_step(tmp_path: Path) -> None:
    """Gone back for once, then skipped, in every pass."""
    options = {"dataset": f"{TOYS}:Spoiled", "arguments": {"bad": [5], "count": 8}}
    settings = recipe(tmp_path, "own", options, steps=6, global_batch=4, micro_batch=1)
    run = tessera.train({**settings, "guard": {"policy": "rollback", "limit": 20}})
    assert [event["action"] for event in told(run)] == ["went back", "skipped", "skipped", "skipped"]


def test_a_loader_is_not_gone_back_in(tmp_path: Path) -> None:
    options = {"loader": f"{TOYS}:spoiled_loader"}
    settings = recipe(tmp_path, "loader", options, steps=6, global_batch=2, micro_batch=1)
    run = tessera.train({**settings, "guard": {"policy": "rollback"}})
    assert {event["action"] for event in told(run)} == {"skipped"}


@pytest.mark.slow
def test_pairs_go_back_and_on_without_one(tmp_path: Path) -> None:
    settings = pair_recipe(write_pair_set(tmp_path / "pairs"), tmp_path, steps=8, micro_batch=2)
    settings["data"] |= {"kind": "tests.toys.pair_faults", "workers": 0, "options": {"nan_pixels": ["sample-7"]}}
    settings["checkpoint"] = {"every": 1}
    run = tessera.train({**settings, "guard": {"policy": "rollback"}})
    (event,) = told(run)
    assert (event["action"], event["samples"]) == ("went back", ["sample-7"])
    assert event["module"].startswith("forward of vision.patch_embed")
    assert "sample-7" in {row["id"] for row in read_jsonl(run.folder / "quarantine.jsonl")}
    losses = [row["loss"] for row in run.metrics if row["kind"] == "train"]
    assert len(losses) == 8
    assert all(loss == loss for loss in losses)
