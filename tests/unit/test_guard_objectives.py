"""The guard over preferences, experts and diffusion: healthy steps raise no alarm, planted faults do and are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tessera
from tessera.core.callback import Callback
from tessera.runtime.files import read_jsonl
from tests.dist.layouts import experts_recipe, videos_recipe
from tests.quick import quick
from tests.toys.faults import FlipBit
from tests.toys.pair_set import pair_recipe, write_pair_set

STEPS, BAD = 24, 20
EXPERTS = "text.layers.1.mlp.experts.down"


class SpoilGradient(Callback):
    """Make one gradient of a step NaN, as a broken kernel does."""

    def on_before_optim(self, trainer: Any) -> None:
        if trainer.step + 1 == BAD:
            next(one.grad for one in trainer.module.parameters() if one.grad is not None).fill_(float("nan"))


def recipe(kind: str, folder: Path, steps: int = STEPS) -> dict[str, Any]:
    if kind == "preferences":
        content = pair_recipe(write_pair_set(folder / "pairs"), folder, steps=steps, global_batch=2, micro_batch=1)
    else:
        content = experts_recipe(folder) if kind == "experts" else videos_recipe(folder)
        content["train"] |= {"steps": steps, "global_batch": 2}
    content["optim"] = {"lr": 3e-3, "schedule": {"kind": "cosine"}}
    return content | {"checkpoint": {"every": 5, "at_end": False}, "guard": {"warmup": 10}}


def events(run: tessera.Run) -> list[tuple[int, str, str]]:
    path = run.folder / "guard.jsonl"
    rows = list(read_jsonl(path)) if path.exists() else []
    return [(row["step"], row["kind"], row["action"]) for row in rows]


@pytest.mark.parametrize("kind", quick(["preferences", "experts", "diffusion"], "preferences"))
def test_only_the_spoiled_step_is_skipped(kind: str, tmp_path: Path) -> None:
    run = tessera.train(recipe(kind, tmp_path), callbacks=[SpoilGradient()])
    assert events(run) == [(BAD, "not finite", "skipped")]
    losses = [row["loss"] for row in run.metrics if row["kind"] == "train"]
    assert len(losses) == STEPS
    assert all(loss == loss for loss in losses)


def test_a_flipped_bit_of_an_expert_is_named_and_undone(tmp_path: Path) -> None:
    run = tessera.train(recipe("experts", tmp_path), callbacks=[FlipBit(BAD, EXPERTS)])
    (event,) = read_jsonl(run.folder / "guard.jsonl")
    assert (event["step"], event["action"]) == (BAD, "went back")
    assert [parameter["name"] for parameter in event["parameters"]] == [EXPERTS]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", ["preferences", "experts", "diffusion"])
def test_a_healthy_run_raises_no_alarm(kind: str, seed: int, tmp_path: Path) -> None:
    content = recipe(kind, tmp_path, steps=150)
    content["train"]["seed"] = seed
    assert events(tessera.train(content | {"guard": {}})) == []
