"""ORPO, SimPO and KTO: their losses and gradients against the formulas, and runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tessera.config.run_config import load_config
from tessera.core.batch import IGNORE, Batch
from tessera.core.task import Task
from tessera.data.kinds.unpaired_preference import RatedAnswer, with_answer_of
from tessera.data.sources.fields import column_map
from tessera.data.sources.formats import parse
from tessera.lora.modules import without_adapters
from tessera.parallel.engine import SimpleEngine
from tessera.tasks.kto import KtoTask
from tessera.tasks.orpo import OrpoTask
from tessera.tasks.simpo import SimpoTask
from tessera.training.build import build_processor, build_rows
from tessera.training.run import resume, train
from tessera.training.setup import build_meta_model
from tests.close import assert_as_close
from tests.errors import raises
from tests.toys.callbacks import StopAt
from tests.toys.pair_set import pair_recipe, rated_recipe, write_pair_set
from tests.unit.test_preference import model_with_adapters

Batches = tuple[Any, list[Batch], Any]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair_set(tmp_path_factory.mktemp("pairs"))


def batches_of(recipe: dict[str, Any]) -> Batches:
    config = load_config(recipe)
    setup = build_meta_model(config, 1)
    processor = build_processor(config, setup)
    rows = build_rows(config, setup, "train", processor)
    return setup, [rows.batch([0]), rows.batch([1, 2])], processor


@pytest.fixture(scope="module")
def pairs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Batches:
    return batches_of(pair_recipe(data, tmp_path_factory.mktemp("out")))


@pytest.fixture(scope="module")
def rated(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Batches:
    return batches_of(rated_recipe(data, tmp_path_factory.mktemp("out")))


# ---------------------------------------------------------------------------------------------- formulas, in float64


def log_probs(module: torch.nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return log-probabilities [samples, 2] of answers and their lengths, token by token from whole logits."""
    logits = module(batch, logits=True)["logits"].log_softmax(-1)
    labelled = batch["labels"] != IGNORE
    log_probs = logits.gather(1, batch["labels"].clamp(min=0)[:, None])[:, 0].where(labelled, 0.0)
    answers = [batch["pair"] == side for side in range(2 * batch["pair_ids"].shape[0])]
    sums = torch.stack([log_probs[answer].sum() for answer in answers]).view(-1, 2)
    return sums, torch.stack([(labelled & answer).sum() for answer in answers]).view(-1, 2)


def simpo(module: torch.nn.Module, microbatches: list[Batch]) -> Tensor:
    losses = []
    for batch in microbatches:
        sums, lengths = log_probs(module, batch)
        for (better, worse), (n, m) in zip(sums, lengths, strict=True):
            margin = 1.5 * (better / n - worse / m) - 0.7
            losses.append(-0.9 * torch.sigmoid(margin).log() - 0.1 * torch.sigmoid(-margin).log())
    return torch.stack(losses).mean()


def orpo(module: torch.nn.Module, microbatches: list[Batch]) -> Tensor:
    language, odds, tokens = [], [], 0
    for batch in microbatches:
        sums, lengths = log_probs(module, batch)
        for (better, worse), (n, m) in zip(sums, lengths, strict=True):
            p, q = (better / n).exp(), (worse / m).exp()
            odds.append(-torch.sigmoid((p / (1 - p)).log() - (q / (1 - q)).log()).log())
            language.append(-better)
            tokens += int(n)
    return torch.stack(language).sum() / tokens + 0.3 * torch.stack(odds).mean()


def kto(module: torch.nn.Module, microbatches: list[Batch]) -> Tensor:
    losses = []
    for batch in microbatches:
        now, _ = log_probs(module, batch)
        with torch.no_grad(), without_adapters(module):
            before, _ = log_probs(module, batch)
        ratios = now - before
        for row in range(len(batch.seeds)):
            here = [number for number, one in enumerate(batch["pair_row"].tolist()) if one == row]
            moved = sum(float(ratios[number, 1].detach()) for number in here) / len(here)
            for number in here:
                gain = 0.5 * (ratios[number, 0] - max(0.0, moved))
                good = bool(batch["desirable"][number])
                losses.append(1.2 * (1 - torch.sigmoid(gain)) if good else 0.8 * (1 - torch.sigmoid(-gain)))
    return torch.stack(losses).mean()


CASES: dict[str, tuple[Callable[[], Task], Callable[[torch.nn.Module, list[Batch]], Tensor]]] = {
    "simpo": (lambda: SimpoTask(beta=1.5, gamma=0.7, label_smoothing=0.1), simpo),
    "orpo": (lambda: OrpoTask(beta=0.3), orpo),
    "kto": (lambda: KtoTask(beta=0.5, desirable_weight=1.2, undesirable_weight=0.8), kto),
}


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_those_of_the_formula_in_float64(name: str, pairs: Batches, rated: Batches) -> None:
    make, formula = CASES[name]
    setup, microbatches, _ = rated if name == "kto" else pairs

    def plain(dtype: torch.dtype) -> dict[str, Tensor]:
        module = model_with_adapters(setup).to(dtype)
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        wide = [batch.with_tensors(**floats(batch, dtype)) for batch in microbatches]
        total = formula(module, wide)
        return {"loss": total, **dict(zip(trained, torch.autograd.grad(total, trained.values()), strict=True))}

    exact, peer = plain(torch.float64), plain(torch.float32)
    module = model_with_adapters(setup)
    out = SimpleEngine(module).step(make(), microbatches)
    ours = {"loss": out.loss(), **{n: p.grad for n, p in module.named_parameters() if p.grad is not None}}
    assert ours.keys() == exact.keys()
    for key, tensor in ours.items():
        # Sums of log-probabilities of tens of tokens are compared: their roundings are not smaller than a few units.
        assert_as_close(tensor.float(), peer[key].float(), exact[key], k=4.0, roundings=4.0, what=key)


def floats(batch: Batch, dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: tensor.to(dtype) for name, tensor in batch.tensors.items() if tensor.is_floating_point()}


@pytest.mark.parametrize("name", CASES)
def test_any_split_gives_the_same_gradient(name: str, pairs: Batches, rated: Batches) -> None:
    make, _ = CASES[name]
    setup, (first, second), _ = rated if name == "kto" else pairs
    results = []
    for parts in ([first, second], [second, first]):
        module = model_with_adapters(setup)
        SimpleEngine(module).step(make(), parts)
        results.append([p.grad for p in module.parameters() if p.grad is not None])
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second)


# ---------------------------------------------------------------------------------------------- rated answers


def test_rated_rows_hold_each_answer_once_more_behind_another_question(data: Path, rated: Batches) -> None:
    _, microbatches, processor = rated
    rows = {row["id"]: row for row in map(json.loads, (data / "rated.jsonl").read_text().splitlines())}
    for batch in microbatches:
        names = batch.sample_ids
        assert batch["desirable"].tolist() == [rows[name]["label"] for name in names]
        said = []
        for side in range(2 * len(names)):
            labels = batch["labels"][batch["pair"] == side]
            said.append(processor.decode(labels[labels != IGNORE].tolist()).strip())
        assert said[::2] == [rows[name]["completion"] for name in names]
        for row in range(len(batch.seeds)):
            here = [n for n, one in enumerate(batch["pair_row"].tolist()) if one == row]
            assert len(here) > 1
            assert [said[2 * n + 1] for n in here] == [said[2 * here[at - 1]] for at in range(len(here))]
        first, second = ((batch["pair"] >= 0) & (batch["pair"] % 2 == side) for side in (0, 1))
        assert int(first.sum()) == int(second.sum())  # what the index promised: twice the tokens


def test_an_answer_behind_its_own_question_again_is_the_same_sample() -> None:
    tokens = torch.arange(9)
    labels = tokens.where(tokens > 4, IGNORE)
    sample = RatedAnswer("a", tokens, labels, torch.tensor([0, 1, 1, 1, 2, 3, 4, 5, 6]).expand(3, -1))
    again = with_answer_of(sample, sample)
    for name in ("tokens", "labels", "positions"):
        assert torch.equal(getattr(again, name), getattr(sample, name))


RATED: dict[str, dict[str, Any]] = {
    "prompt": {"prompt": "Who?", "completion": "I.", "label": True},
    "turns": {"prompt": [{"role": "user", "content": "Who?"}], "completion": [{"role": "assistant", "content": "I."}]},
    "messages": {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}]},
    "sharegpt": {"conversations": [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "I."}]},
    "alpaca": {"instruction": "Who?", "output": "I."},
}


@pytest.mark.parametrize("name", RATED)
@pytest.mark.parametrize(("tag", "role"), [({"label": True}, "chosen"), ({"kto_tag": False}, "rejected")])
def test_every_spelling_of_a_rated_answer_means_the_same(name: str, tag: dict[str, bool], role: str) -> None:
    row = {key: value for key, value in RATED[name].items() if key != "label"} | tag
    said = [
        (m.role, m.parts[0].value) for m in parse(row, "unpaired_preference", column_map("unpaired_preference", {}))
    ]
    assert said == [("user", "Who?"), (role, "I.")]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"prompt": "Who?", "completion": "I."}, "data.bad-label"),
        ({"prompt": "Who?", "completion": "I.", "label": "perhaps"}, "data.bad-label"),
        ({"prompt": "Who?", "completion": "I.", "label": 0.5}, "data.bad-label"),
        ({"prompt": "Who?", "label": True}, "data.no-answer"),
        ({"completion": "I.", "label": True}, "data.no-question"),
        ({"messages": [{"role": "user", "content": "Who?"}], "label": True}, "data.bad-answer"),
    ],
)
def test_rows_that_are_no_rated_answers_are_told(row: dict[str, Any], told: str) -> None:
    with raises(told):
        parse(row, "unpaired_preference", column_map("unpaired_preference", {}))


def test_a_hole_among_rated_answers_counts_for_nothing(rated: Batches) -> None:
    setup, (batch, _), _ = rated
    emptied = batch.with_tensors(labels=batch["labels"].where(batch["pair"] != 0, IGNORE))
    out = SimpleEngine(model_with_adapters(setup)).step(KtoTask(), [emptied])
    assert float(out.counts["samples"]) == batch["pair_ids"].shape[0] - 1


# ---------------------------------------------------------------------------------------------- runs


@pytest.mark.slow
@pytest.mark.parametrize("task", ["orpo", "simpo", "kto"])
def test_it_learns_reports_its_metrics_and_resumes_bitwise(task: str, data: Path, tmp_path: Path) -> None:
    recipe = rated_recipe(data, tmp_path / "whole", steps=8) if task == "kto" else pair_recipe(data, tmp_path, steps=8)
    recipe["train"]["task"] = task
    settings = {"optim.lr": 1e-2, "checkpoint.every": 4}
    run = train(recipe, settings)
    rows = [row for row in run.metrics if row["kind"] == "train"]
    assert rows[-1]["loss"] < rows[0]["loss"]
    names = ("reward_good", "reward_bad", "kl") if task == "kto" else ("margin", "accuracy", "reward_chosen")
    assert all(name in rows[-1] for name in names)
    if task == "kto":
        assert rows[0]["loss"] == pytest.approx(0.5, abs=1e-5)  # the model still equals its reference
    stopped = train({**recipe, "name": "stopped"}, settings, callbacks=[StopAt(4)])
    again = [row["loss"] for row in resume(stopped.folder).metrics if row["kind"] == "train"]
    assert again == [row["loss"] for row in rows]


def test_data_of_another_kind_is_refused_with_the_kind_to_take(data: Path, tmp_path: Path) -> None:
    with raises("task.data-kind", "unpaired_preference"):
        train(pair_recipe(data, tmp_path, steps=1), {"train.task": "kto"})
    with raises("data.wrong-kind", "unpaired_preference"):
        train(
            rated_recipe(data, tmp_path, steps=1),
            {"data.kind": "chat", "data.train.0.format": "unpaired_preference"},
        )
    with raises("recipe.wrong-value", "label_smoothing"):
        train(pair_recipe(data, tmp_path, steps=1), {"train.task": "simpo", "train.task_options.label_smoothing": 0.5})
