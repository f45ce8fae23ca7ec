"""Any split of a global batch gives the same training: micro-batches, ranks, recompute, and a change of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tessera.train.callbacks import Callback
from tessera.train.run import Run, resume, train
from tests.close import assert_within_rounding, move_by_a_rounding
from tests.dist.spawn import run_ranks
from tests.needs import need_half_attention
from tests.toys.callbacks import StopAt
from tests.toys.chat_set import chat_recipe, write_chat_set


class KeepGradients(Callback):
    """The first step's gradients, whole, as lists: they cross a process border. `move`: begins from weights that are
    one rounding away, which shows how far apart two right results may be."""

    def __init__(self, move: bool = False) -> None:
        self.found: dict[str, list[float]] = {}
        self.move = move

    def on_start(self, trainer: Any) -> None:
        if self.move:
            move_by_a_rounding(trainer.module.parameters(), seed=0)

    def on_before_optim(self, trainer: Any) -> None:
        from tessera.core.names import clean

        if trainer.step == 0:
            for name, parameter in trainer.module.named_parameters():
                grad = parameter.grad
                assert grad is not None, name
                whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
                self.found[clean(name)] = whole.flatten().double().tolist()


def run_once(
    rank: int, world: int, recipe: dict[str, Any], overrides: dict[str, Any], stop: int | None, move: bool = False
) -> Any:
    keep = KeepGradients(move)
    callbacks: list[Callback] = [keep, *([StopAt(stop)] if stop else [])]
    run = train(recipe, overrides, callbacks=callbacks)
    return keep.found, losses(run)


def run_each(rank: int, world: int, recipes: list[dict[str, Any]], each: list[dict[str, Any]]) -> list[Any]:
    """One after another in the same processes: starting them is the slow part."""
    return [run_once(rank, world, recipe, overrides, None) for recipe, overrides in zip(recipes, each, strict=True)]


def go_on(rank: int, world: int, folder: str, stop: int | None) -> list[float]:
    return losses(resume(folder, callbacks=[StopAt(stop)] if stop else []))


def losses(run: Run) -> list[float]:
    return [row["loss"] for row in run.metrics if row["kind"] == "train"]


def samples_by_step(folder: Path) -> dict[int, list[str]]:
    seen: dict[int, list[str]] = {}
    for path in (folder / "ledger").glob("*.jsonl"):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            seen.setdefault(row["step"], []).extend(name for micro in row["samples"] for name in micro)
    return {step: sorted(names) for step, names in sorted(seen.items())}


def final_weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    shards = sorted((folder / "checkpoints" / f"step-{step:08d}").glob("*.safetensors"))
    return {name: tensor for shard in shards for name, tensor in load_file(shard).items()}


def tensors(gradients: dict[str, list[float]]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(values) for name, values in gradients.items()}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_set(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def reference(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[float]], list[float], Path]:
    out = tmp_path_factory.mktemp("one")
    gradients, values = run_once(0, 1, chat_recipe(data, out), {"checkpoint.every": 0}, None)
    return gradients, values, out / "chat"


@pytest.fixture(scope="module")
def moved(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Gradients from weights that are one rounding away."""
    recipe = chat_recipe(data, tmp_path_factory.mktemp("moved"))
    found, _ = run_once(0, 1, recipe, {"checkpoint.every": 0}, 1, move=True)
    return found


SPLITS = [
    (1, {"train.micro_batch": 2}),
    (1, {"train.micro_batch": 4}),
    (1, {"data.workers": 2}),
    (1, {"parallel.recompute": ["text.layers.{*}", "vision.blocks.{0}"]}),
    (2, {}),
    (2, {"train.micro_batch": 2}),
    (2, {"parallel.reshard_after_forward": False, "parallel.recompute": ["text.layers.{0}"]}),
    (4, {}),
    (4, {"parallel.shard": 2}),
]


@pytest.fixture(scope="module")
def splits(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, list[float], Path]]:
    """Gradients, losses and the folder of each, in their order."""
    out = tmp_path_factory.mktemp("splits")
    places = [out / str(number) for number in range(len(SPLITS))]
    found: dict[int, Any] = {}
    for world in sorted({world for world, _ in SPLITS}):
        here = [number for number, (ranks, _) in enumerate(SPLITS) if ranks == world]
        recipes = [chat_recipe(data, places[number]) for number in here]
        each = [{"checkpoint.every": 0, **SPLITS[number][1]} for number in here]
        found |= dict(zip(here, run_ranks(run_each, world, recipes, each)[0], strict=True))
    return [(*found[number], places[number] / "chat") for number in range(len(SPLITS))]


@pytest.mark.parametrize("number", range(len(SPLITS)), ids=[f"{world} {settings}" for world, settings in SPLITS])
def test_any_split_gives_the_same_gradients_and_losses(number: int, splits: Any, reference: Any, moved: Any) -> None:
    expected, values, folder = reference
    gradients, losses_found, own_folder = splits[number]
    assert_within_rounding(tensors(gradients), tensors(expected), tensors(moved))
    assert losses_found == pytest.approx(values, rel=1e-5)
    assert samples_by_step(own_folder) == samples_by_step(folder)


def test_four_then_one_then_two_ranks_see_the_same_samples_and_losses(
    data: Path, tmp_path: Path, reference: Any
) -> None:
    _, values, folder = reference
    run_ranks(run_once, 4, chat_recipe(data, tmp_path), {}, 2)
    run_ranks(go_on, 1, str(tmp_path / "chat"), 4)
    found = run_ranks(go_on, 2, str(tmp_path / "chat"), None)[0]
    assert found == pytest.approx(values, rel=1e-5)
    assert samples_by_step(tmp_path / "chat") == samples_by_step(folder)


def test_packed_equals_unpacked(data: Path, tmp_path: Path) -> None:
    """The same samples, all in one step: once packed into rows, once each in a row of its own."""
    base = {"checkpoint.every": 0, "train.steps": 1, "data.train.0.max_samples": 12, "data.shuffle": False}
    alone = {**base, "data.pack": False, "train.global_batch": 12}
    one, _ = run_once(0, 1, chat_recipe(data, tmp_path / "a"), alone, None)
    near, _ = run_once(0, 1, chat_recipe(data, tmp_path / "near"), alone, None, move=True)
    packs = {**base, "data.length": 4096, "train.global_batch": 1}
    all_in_one, _ = run_once(0, 1, chat_recipe(data, tmp_path / "b"), packs, None)
    assert samples_by_step(tmp_path / "a" / "chat") == samples_by_step(tmp_path / "b" / "chat")
    assert_within_rounding(tensors(all_in_one), tensors(one), tensors(near))


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_mixed_precision_saves_after_an_evaluation(world: int, data: Path, tmp_path: Path) -> None:
    """bf16 computation over fp32 master weights; evaluation leaves weights gathered, and saving must not mind."""
    need_half_attention()
    recipe = chat_recipe(data, tmp_path, eval_every=2)
    overrides = {"parallel.param_dtype": "bfloat16", "parallel.reduce_dtype": "bfloat16"}
    _, values = run_ranks(run_once, world, recipe, overrides, None)[0]
    assert values[-1] < values[0]
    saved = final_weights(tmp_path / "chat", 6)
    assert {t.dtype for t in saved.values()} == {torch.float32}


def whole_and_part(rank: int, world: int, data: Path, folder: Path) -> None:
    run_once(rank, world, chat_recipe(data, folder / "whole"), {}, None)
    run_once(rank, world, chat_recipe(data, folder / "part"), {}, 3)


def test_two_ranks_resume_bitwise(data: Path, tmp_path: Path) -> None:
    run_ranks(whole_and_part, 2, data, tmp_path)
    run_ranks(go_on, 2, str(tmp_path / "part" / "chat"), None)  # in new processes
    expected, found = final_weights(tmp_path / "whole" / "chat", 6), final_weights(tmp_path / "part" / "chat", 6)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
