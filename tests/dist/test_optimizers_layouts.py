"""Muon and Lion under layouts: the weights of one process, the bytes that the plan says, resumed as another layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tessera.runtime.files import read_metrics
from tessera.training.run import resume, train
from tests.dist.layout_cases import DEEP, SEQUENCE
from tests.dist.layouts import Case, good, measure, recipe_of
from tests.dist.spawn import run_ranks
from tests.toys.callbacks import StopAt
from tests.toys.chat_set import write_chat_set

MUON: dict[str, Any] = {"optim.name": "muon"}
LION: dict[str, Any] = {"optim.name": "lion", "optim.eps": 1e-8, "optim.lr": 1e-4}
ADAFACTOR: dict[str, Any] = {"optim.name": "adafactor", "optim.eps": 1e-8, "optim.lr": 1e-3}
CASES = [
    Case("muon, fsdp 2", 2, {}, MUON),
    Case("muon, tp 2 x fsdp 2, sequence", 4, SEQUENCE, MUON),
    Case("muon, 1f1b", 2, {"pp": 2}, {**DEEP, **MUON}),
    Case("muon, experts, ep 2 x shard 4", 4, {"ep": 2}, MUON, "experts"),
    Case("lion, hsdp 2x2", 4, {"shard": 2}, LION),
    Case("lion, tp 2", 2, {"tp": 2}, LION),
    Case("adafactor, hsdp 2x2", 4, {"shard": 2}, ADAFACTOR),
    Case("adafactor, tp 2 x fsdp 2, sequence", 4, SEQUENCE, ADAFACTOR),
    Case("adafactor, experts, ep 2 x shard 4", 4, {"ep": 2}, ADAFACTOR, "experts"),
]


@pytest.mark.slow
def test_other_optimizers_train_as_in_one_process(tmp_path: Path) -> None:
    results = measure(CASES, tmp_path)
    assert {name: row for name, row in results.items() if row["bytes"] >= 0.01} == {}
    wrong = {}
    for name, row in results.items():
        weights = row.pop("weight")
        if not good(row):
            wrong[name] = row
        # Where an element's update is a sign, or a matrix is brought to equal singular values, rounding of a gradient
        # near zero moves the weight by a step; a wrong shard would move all of them by many.
        if weights > 2e-3:
            wrong[name] = {"weight": weights}
    assert wrong == {}


def run_stopped(rank: int, world: int, recipe: dict[str, Any], overrides: dict[str, Any], stop: int | None) -> None:
    train(recipe, overrides, callbacks=[StopAt(stop)] if stop else [])


def go_on(rank: int, world: int, folder: str, overrides: dict[str, Any]) -> None:
    resume(folder, overrides)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["muon", "lion", "adafactor"])
def test_a_resumed_run_is_bitwise_and_another_layout_goes_on_from_its_state(name: str, tmp_path: Path) -> None:
    write_chat_set(tmp_path / "data")
    settings = {"optim.name": name, "optim.eps": 1e-8, "train.steps": 4, "checkpoint.at_end": True}
    losses = {}
    for which, stop in (("whole", None), ("stopped", 2)):
        recipe = recipe_of(tmp_path / "data", tmp_path / which)
        train(recipe, settings, callbacks=[StopAt(stop)] if stop else [])
        run = tmp_path / which / "chat"
        losses[which] = [row["loss"] for row in train_metrics(resume(run).folder if stop else run)]
    assert losses["stopped"] == losses["whole"]
    run_ranks(run_stopped, 2, recipe_of(tmp_path / "data", tmp_path / "other"), settings, 2)
    run_ranks(go_on, 2, str(tmp_path / "other" / "chat"), {"parallel.tp": 2})
    other = [row["loss"] for row in train_metrics(tmp_path / "other" / "chat")]
    assert torch.allclose(torch.tensor(other), torch.tensor(losses["whole"]), rtol=1e-3)


def train_metrics(folder: Path) -> list[dict[str, Any]]:
    return [row for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == "train"]
