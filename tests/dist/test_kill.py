"""Kill -9 at random moments, inside saves too; resume; the end is bitwise that of the run that was never killed."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tessera.training.run import resume, train
from tests.dist.spawn import fork_context
from tests.toys.chat_set import chat_recipe, write_chat_set

STEPS = 6


def job(rank: int, world: int, store: str, recipe: dict[str, Any], begun: bool) -> None:
    """One rank of the run, however far it has come. Saves after every step, so that a kill often falls into a save."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    if begun:
        resume(Path(recipe["out"]) / recipe["name"])
    else:
        train(recipe)
    dist.destroy_process_group()


def start(world: int, scratch: Path, recipe: dict[str, Any]) -> list[Any]:
    context = fork_context()
    store = scratch / f"store-{time.monotonic_ns()}"
    begun = (Path(recipe["out"]) / recipe["name"] / "config.yaml").exists()
    ranks = [context.Process(target=job, args=(rank, world, str(store), recipe, begun)) for rank in range(world)]
    for rank in ranks:
        rank.start()
    return ranks


def finish(ranks: list[Any]) -> None:
    for rank in ranks:
        rank.join(120)
        assert rank.exitcode == 0


def kill(ranks: list[Any]) -> bool:
    """Kills every rank as a dying machine would; False if the run had ended by itself."""
    alive = [rank for rank in ranks if rank.exitcode is None]
    for rank in alive:
        os.kill(rank.pid, signal.SIGKILL)
    for rank in ranks:
        rank.join(30)
    return bool(alive)


def result(recipe: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list[Any], list[Any]]:
    folder = Path(recipe["out"]) / recipe["name"]
    shards = sorted((folder / "checkpoints" / f"step-{STEPS:08d}").glob("*.safetensors"))
    tensors = {f"{shard.name}:{name}": t for shard in shards for name, t in load_file(shard).items()}
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    curve = [(row["step"], row["loss"], row["grad_norm"]) for row in metrics if row["kind"] == "train"]
    ledger = [sorted(path.read_text().splitlines()) for path in sorted((folder / "ledger").glob("*"))]
    return tensors, curve, ledger


def prove(world: int, trials: int, tmp_path: Path, seed: int) -> None:
    data = write_chat_set(tmp_path / "data", samples=24)

    def recipe(name: str) -> dict[str, Any]:
        settings = chat_recipe(data, tmp_path / name, steps=STEPS, global_batch=2)
        settings["checkpoint"] = {"every": 1, "keep": 2}
        settings["data"]["eval"] = []
        return settings

    ready = fork_context().Process(target=os.getpid)  # the fork server has imported everything when this one starts
    ready.start()
    ready.join()
    began = time.monotonic()
    finish(start(world, tmp_path, recipe("whole")))
    duration = time.monotonic() - began
    expected, curve, ledger = result(recipe("whole"))
    assert len(curve) == STEPS

    chance = random.Random(seed)
    killed = 0
    for trial in range(trials):
        mine = recipe(f"trial-{trial}")
        ranks = start(world, tmp_path, mine)
        time.sleep(chance.uniform(0, 0.7 * duration))  # the measured run may have had a busier machine
        killed += kill(ranks)
        finish(start(world, tmp_path, mine))
        weights, curve_found, ledger_found = result(mine)
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], expected[name]) for name in expected), f"trial {trial}"
        assert curve_found == curve
        assert ledger_found == ledger
    assert killed > trials // 4, "kills should have hit living runs"


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_killed_anywhere_ends_bitwise_the_same(world: int, tmp_path: Path) -> None:
    prove(world, trials=2, tmp_path=tmp_path, seed=world)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_fifty_kills(world: int, tmp_path: Path) -> None:
    prove(world, trials=50, tmp_path=tmp_path, seed=100 + world)
