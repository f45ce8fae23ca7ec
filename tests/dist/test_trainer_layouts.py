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
from tests.dist.spawn import run_ranks
from tests.toys.callbacks import StopAt
from tests.toys.chat_set import chat_recipe, write_chat_set


class KeepGradients(Callback):
    """The first step's gradients, whole, as lists: they cross a process border."""

    def __init__(self) -> None:
        self.found: dict[str, list[float]] = {}

    def on_before_optim(self, trainer: Any) -> None:
        from tessera.core.names import clean

        if trainer.step == 0:
            for name, parameter in trainer.module.named_parameters():
                grad = parameter.grad
                assert grad is not None, name
                whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
                self.found[clean(name)] = whole.flatten().double().tolist()


def run_once(rank: int, world: int, recipe: dict[str, Any], overrides: dict[str, Any], stop: int | None) -> Any:
    keep = KeepGradients()
    callbacks: list[Callback] = [keep, *([StopAt(stop)] if stop else [])]
    run = train(recipe, overrides, callbacks=callbacks)
    return keep.found, losses(run)


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


def relative(found: list[float], expected: list[float]) -> float:
    a, b = torch.tensor(found), torch.tensor(expected)
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-12))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_set(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def reference(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[float]], list[float], Path]:
    out = tmp_path_factory.mktemp("one")
    gradients, values = run_once(0, 1, chat_recipe(data, out), {"checkpoint.every": 0}, None)
    return gradients, values, out / "chat"


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


@pytest.mark.parametrize(("world", "overrides"), SPLITS, ids=lambda v: str(v))
def test_any_split_gives_the_same_gradients_and_losses(
    world: int, overrides: dict[str, Any], data: Path, tmp_path: Path, reference: Any
) -> None:
    expected, values, folder = reference
    found = run_ranks(run_once, world, chat_recipe(data, tmp_path), {"checkpoint.every": 0, **overrides}, None)
    gradients, losses_found = found[0]
    assert gradients.keys() == expected.keys()
    worst = max(relative(gradients[name], expected[name]) for name in expected)
    assert worst < 1e-6 if world <= 2 else worst < 3e-6, worst
    assert losses_found == pytest.approx(values, rel=1e-5)
    assert samples_by_step(tmp_path / "chat") == samples_by_step(folder)


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
    one, _ = run_once(
        0, 1, chat_recipe(data, tmp_path / "a"), {**base, "data.pack": False, "train.global_batch": 12}, None
    )
    packs = {**base, "data.length": 4096, "train.global_batch": 1}
    all_in_one, _ = run_once(0, 1, chat_recipe(data, tmp_path / "b"), packs, None)
    assert samples_by_step(tmp_path / "a" / "chat") == samples_by_step(tmp_path / "b" / "chat")
    assert max(relative(all_in_one[name], one[name]) for name in one) < 1e-6


@pytest.mark.parametrize("world", [1, 2])
def test_mixed_precision_saves_after_an_evaluation(world: int, data: Path, tmp_path: Path) -> None:
    """bf16 computation over fp32 master weights; evaluation leaves weights gathered, and saving must not mind."""
    recipe = chat_recipe(data, tmp_path, eval_every=2)
    overrides = {"parallel.param_dtype": "bfloat16", "parallel.reduce_dtype": "bfloat16"}
    _, values = run_ranks(run_once, world, recipe, overrides, None)[0]
    assert values[-1] < values[0]
    saved = final_weights(tmp_path / "chat", 6)
    assert {t.dtype for t in saved.values()} == {torch.float32}


def test_two_ranks_resume_bitwise(data: Path, tmp_path: Path) -> None:
    run_ranks(run_once, 2, chat_recipe(data, tmp_path / "whole"), {}, None)
    run_ranks(run_once, 2, chat_recipe(data, tmp_path / "part"), {}, 3)
    run_ranks(go_on, 2, str(tmp_path / "part" / "chat"), None)
    expected, found = final_weights(tmp_path / "whole" / "chat", 6), final_weights(tmp_path / "part" / "chat", 6)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
