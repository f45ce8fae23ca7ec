"""Any split of a global batch gives the same training: micro-batches, ranks, recompute, and a change of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tessera.core.callback import Callback
from tessera.training.run import Run, resume, train
from tests.close import assert_within_rounding, move_by_a_rounding
from tests.dist.spawn import end_ranks, run_ranks
from tests.toys.callbacks import StopAt
from tests.toys.chat_set import chat_recipe, write_chat_set

STEPS = 3


def recipe_of(data: Path, out: Path) -> dict[str, Any]:
    return chat_recipe(data, out, steps=STEPS)


class KeepGradients(Callback):
    """The first step's gradients, whole, as lists: they cross a process border. `move`: begins from weights that are
    one rounding away, which shows how far apart two right results may be."""

    def __init__(self, move: bool = False) -> None:
        self.gradients: dict[str, list[float]] = {}
        self.move = move

    def on_start(self, trainer: Any) -> None:
        if self.move:
            move_by_a_rounding(trainer.module.parameters(), seed=0)

    def on_before_optim(self, trainer: Any) -> None:
        from tessera.runtime.modules import clean_name

        if trainer.step == 0:
            for name, parameter in trainer.module.named_parameters():
                grad = parameter.grad
                assert grad is not None, name
                whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
                self.gradients[clean_name(name)] = whole.flatten().double().tolist()


def run_once(
    rank: int, world: int, recipe: dict[str, Any], overrides: dict[str, Any], stop: int | None, move: bool = False
) -> Any:
    keep = KeepGradients(move)
    callbacks: list[Callback] = [keep, *([StopAt(stop)] if stop else [])]
    run = train(recipe, overrides, callbacks=callbacks)
    return keep.gradients, losses(run)


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
    gradients, values = run_once(0, 1, recipe_of(data, out), {"checkpoint.every": 0}, None)
    return gradients, values, out / "chat"


@pytest.fixture(scope="module")
def moved(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Gradients from weights that are one rounding away."""
    recipe = recipe_of(data, tmp_path_factory.mktemp("moved"))
    gradients, _ = run_once(0, 1, recipe, {"checkpoint.every": 0}, 1, move=True)
    return gradients


SPLITS: list[tuple[int, dict[str, Any]]] = [
    (2, {"train.micro_batch": 2}),
]
MORE_SPLITS: list[tuple[int, dict[str, Any]]] = [
    (1, {"data.workers": 2}),
    (1, {"train.micro_batch": 4}),
    (1, {"train.micro_batch": 2}),
    (1, {"parallel.recompute": ["text.layers.{*}", "vision.blocks.{0}"]}),
    (2, {}),
    (2, {"parallel.reshard_after_forward": False, "parallel.recompute": ["text.layers.{0}"]}),
    (4, {}),
    (4, {"parallel.shard": 2}),
]
Found = list[tuple[Any, list[float], Path]]


def train_splits(splits: list[tuple[int, dict[str, Any]]], data: Path, out: Path) -> Found:
    """Gradients, losses and the folder of each, in their order."""
    folders = [out / str(number) for number in range(len(splits))]
    results: dict[int, Any] = {}
    for world in sorted({world for world, _ in splits}):
        here = [number for number, (ranks, _) in enumerate(splits) if ranks == world]
        recipes = [recipe_of(data, folders[number]) for number in here]
        each = [{"checkpoint.every": 0, **splits[number][1]} for number in here]
        results |= dict(zip(here, run_ranks(run_each, world, recipes, each)[0], strict=True))
    return [(*results[number], folders[number] / "chat") for number in range(len(splits))]


def check_splits(results: Found, reference: Any, moved: Any) -> None:
    expected, values, folder = reference
    for gradients, losses_found, own_folder in results:
        assert_within_rounding(tensors(gradients), tensors(expected), tensors(moved))
        assert losses_found == pytest.approx(values, rel=1e-5)
        assert samples_by_step(own_folder) == samples_by_step(folder)


@pytest.mark.slow
def test_any_split_gives_the_same_gradients_and_losses(data: Path, reference: Any, moved: Any, tmp_path: Path) -> None:
    check_splits(train_splits(SPLITS, data, tmp_path), reference, moved)


@pytest.mark.slow
def test_more_splits_give_the_same_gradients_and_losses(data: Path, reference: Any, moved: Any, tmp_path: Path) -> None:
    check_splits(train_splits(MORE_SPLITS, data, tmp_path), reference, moved)


@pytest.mark.slow
def test_four_then_one_then_two_ranks_see_the_same_samples_and_losses(
    data: Path, tmp_path: Path, reference: Any
) -> None:
    _, values, folder = reference
    run_ranks(run_once, 4, recipe_of(data, tmp_path), {}, 1)
    go_on(0, 1, str(tmp_path / "chat"), 2)
    resumed = run_ranks(go_on, 2, str(tmp_path / "chat"), None)[0]
    assert resumed == pytest.approx(values, rel=1e-5)
    assert samples_by_step(tmp_path / "chat") == samples_by_step(folder)


def test_packed_equals_unpacked(data: Path, tmp_path: Path) -> None:
    """The same samples, all in one step: once packed into rows, once each in a row of its own."""
    base = {"checkpoint.every": 0, "train.steps": 1, "data.train.0.max_samples": 12, "data.shuffle": False}
    alone = {**base, "data.pack": False, "train.global_batch": 12}
    first, _ = run_once(0, 1, chat_recipe(data, tmp_path / "a"), alone, None)
    near, _ = run_once(0, 1, chat_recipe(data, tmp_path / "near"), alone, None, move=True)
    packs = {**base, "data.length": 4096, "train.global_batch": 1}
    all_in_one, _ = run_once(0, 1, chat_recipe(data, tmp_path / "b"), packs, None)
    assert samples_by_step(tmp_path / "a" / "chat") == samples_by_step(tmp_path / "b" / "chat")
    assert_within_rounding(tensors(all_in_one), tensors(first), tensors(near))


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_mixed_precision_saves_after_an_evaluation(world: int, data: Path, tmp_path: Path) -> None:
    """bf16 computation over fp32 master weights; evaluation leaves weights gathered, and saving must not mind."""
    recipe = chat_recipe(data, tmp_path, steps=4, eval_every=2)
    overrides = {"precision.compute": "bfloat16", "precision.reduce": "bfloat16"}
    _, values = run_ranks(run_once, world, recipe, overrides, None)[0]
    assert values[-1] < values[0]
    saved = final_weights(tmp_path / "chat", 4)
    assert {t.dtype for t in saved.values()} == {torch.float32}


def whole_and_part(rank: int, world: int, data: Path, folder: Path) -> None:
    run_once(rank, world, recipe_of(data, folder / "whole"), {"train.steps": 2}, None)
    run_once(rank, world, recipe_of(data, folder / "part"), {"train.steps": 2}, 1)


def test_two_ranks_resume_bitwise(data: Path, tmp_path: Path) -> None:
    run_ranks(whole_and_part, 2, data, tmp_path)
    end_ranks(2)  # what goes on knows nothing but the files
    run_ranks(go_on, 2, str(tmp_path / "part" / "chat"), None)
    expected, resumed = (final_weights(tmp_path / run / "chat", 2) for run in ("whole", "part"))
    assert expected.keys() == resumed.keys()
    assert all(torch.equal(resumed[name], expected[name]) for name in expected)
