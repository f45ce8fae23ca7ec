"""The guard, the average and answers on several ranks: the same faults, the same names and the same end as on one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tessera.errors import TesseraError
from tessera.runtime.files import read_jsonl
from tessera.training.records import read_ledger
from tessera.training.run import Run, train
from tests.dist.layout_cases import FOUR_LAYERS
from tests.dist.spawn import run_ranks
from tests.toys.chat_set import chat_recipe, write_chat_set
from tests.toys.faults import FlipBit

STEPS, BAD, FLIPPED = 6, 3, 5
WEIGHT = "text.layers.1.mlp.down.weight"


def recipe(data: Path, out: Path, victims: list[str], policy: str, rows: int = 4) -> dict[str, Any]:
    settings = chat_recipe(data, out, steps=STEPS, global_batch=rows, generate_every=STEPS, generate_samples=2)
    settings["train"]["ema"] = {"decay": 0.8}
    settings["train"]["generate_tokens"] = 4
    settings["model"]["config"] = FOUR_LAYERS
    settings["data"] |= {"kind": "tests.toys.faults", "workers": 0, "options": {"nan_pixels": victims}}
    settings["checkpoint"] = {"every": 2}
    settings["guard"] = {"policy": policy}
    return settings


def told(run: Run) -> dict[str, Any]:
    """What a run left behind, as plain data."""
    assert run.checkpoint is not None
    saved = {n: t for path in run.checkpoint.glob("*.safetensors") for n, t in load_file(path).items()}
    average: dict[str, Any] = {}
    for name, tensor in saved.items():
        if name.startswith("ema."):
            average.setdefault(name.split("@")[0], []).append(float(tensor.double().square().sum()))
    return {
        "events": list(read_jsonl(run.folder / "guard.jsonl")),
        "losses": [row["loss"] for row in run.metrics if row["kind"] == "train" and not row.get("skipped")],
        "held_out": [row["eval_loss"] for row in run.metrics if "eval_loss" in row][-1],
        "answers": [row["answer"] for row in read_jsonl(run.folder / f"answers-step-{STEPS}.jsonl")],
        "average": {name: sum(squares) for name, squares in average.items()},
        "quarantine": [row["id"] for row in read_jsonl(run.folder / "quarantine.jsonl")],
    }


def faulty(rank: int, world: int, settings: dict[str, Any], parallel: dict[str, Any]) -> dict[str, Any]:
    return told(train({**settings, "parallel": parallel}, callbacks=[FlipBit(FLIPPED, WEIGHT)]))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_set(tmp_path_factory.mktemp("chat"), samples=60)


@pytest.fixture(scope="module")
def victim(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    """By the rows of a step, each looked for when it is first asked for."""

    @functools.cache
    def look(rows: int) -> str:
        settings = recipe(data, tmp_path_factory.mktemp("look"), [], "off", rows)
        run = train(settings, {"train.steps": BAD, "train.generate_every": 0, "guard.coverage": "off"})
        ids = [name for _, names in read_ledger(run.folder)[BAD] for name in names]
        return next(name for name in reversed(ids) if int(name.split("-")[1]) % 3)

    return look


@pytest.fixture(scope="module")
def alone(data: Path, victim: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], dict[str, Any]]:
    """By policy and rows of a step, each trained when it is first asked for."""

    @functools.cache
    def result(policy: str, rows: int) -> dict[str, Any]:
        return faulty(0, 1, recipe(data, tmp_path_factory.mktemp("one"), [victim(rows)], policy, rows), {})

    return result


CASES = [
    pytest.param("rollback", 2, {}, marks=pytest.mark.slow),
    pytest.param("skip", 2, {"tp": 2}, marks=pytest.mark.slow),
    pytest.param("rollback", 2, {"pp": 2}, marks=pytest.mark.slow),
    pytest.param("skip", 2, {}, marks=pytest.mark.slow),
    pytest.param("rollback", 2, {"tp": 2}, marks=pytest.mark.slow),
    pytest.param("skip", 2, {"pp": 2}, marks=pytest.mark.slow),
    pytest.param("skip", 4, {"pp": 2, "accumulate": "local"}, marks=pytest.mark.slow),
    pytest.param("rollback", 4, {"pp": 2, "schedule": "zbv"}, marks=pytest.mark.slow),
    pytest.param("rollback", 4, {"shard": 2, "recompute": ["text.layers.{*}"]}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("policy", "world", "parallel"), CASES, ids=str)
def test_any_layout_names_and_survives_the_same_faults(
    policy: str, world: int, parallel: dict[str, Any], data: Path, victim: Any, tmp_path: Path, alone: Any
) -> None:
    expected, bad_sample = alone(policy, world), victim(world)
    result = run_ranks(faulty, world, recipe(data, tmp_path, [bad_sample], policy, world), parallel, timeout=240)[0]
    assert facts(result["events"]) == facts(expected["events"])
    bad, flipped = result["events"][0], result["events"][-1]
    assert (bad["step"], bad["samples"]) == (BAD, [bad_sample])
    assert bad["module"].startswith("forward of vision.patch_embed")
    assert [one["name"] for one in flipped["parameters"]] == [WEIGHT]
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-4)
    assert result["held_out"] == pytest.approx(expected["held_out"], rel=1e-4)
    assert result["answers"] == expected["answers"]
    assert result["quarantine"] == expected["quarantine"] == ([] if policy == "skip" else [bad_sample])
    assert result["average"].keys() == expected["average"].keys()
    for name, value in expected["average"].items():
        assert result["average"][name] == pytest.approx(value, rel=1e-4), name


def facts(events: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [
        (e["step"], e["kind"], e["module"], e["samples"], [p["name"] for p in e["parameters"]], e.get("back_to"))
        for e in events
    ]


def refused(rank: int, world: int, settings: dict[str, Any]) -> str:
    with pytest.raises(TesseraError) as caught:
        train({**settings, "parallel": {"cp": 2}})
    return caught.value.what


def test_answers_need_whole_rows(data: Path, tmp_path: Path) -> None:
    assert "parallel.cp" in run_ranks(refused, 2, recipe(data, tmp_path, [], "skip"))[0]


def covered(rank: int, world: int, settings: dict[str, Any], parallel: dict[str, Any]) -> None:
    train({**settings, "parallel": parallel}, {"train.steps": 1, "train.generate_every": 0})


LAYOUTS = [*(pytest.param(each, marks=pytest.mark.slow) for each in ({}, {"tp": 2}, {"cp": 2})), {"pp": 2}]


@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
def test_every_tensor_is_covered_in_any_layout(data: Path, tmp_path: Path, parallel: dict[str, Any]) -> None:
    run_ranks(covered, 2, recipe(data, tmp_path, [], "skip"), parallel)
    said = (tmp_path / "chat" / "logs" / "rank-00000.log").read_text().splitlines()
    (line,) = [line for line in said if "gradients of the first step" in line]
    parts = {words.split()[0]: words.split()[1:] for words in line.split(": ")[-1].split(", ")}
    assert list(parts) == ["vision", "projector", "text"]
    assert all(received == trained for received, _, trained in parts.values())
