"""Pairs of answers: how they are spelled, how they lie in a batch, and what DPO makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from tessera.api import plan
from tessera.config.run_config import LoraSection, RecordFormat, SourceSection, load_config
from tessera.core.batch import IGNORE, Batch
from tessera.core.callback import Callback
from tessera.core.sample import Sample
from tessera.data.sources.container import RecordError
from tessera.data.sources.fields import column_map
from tessera.data.sources.formats import parse
from tessera.data.sources.source import open_source
from tessera.errors import TesseraError
from tessera.lora.modules import add_adapters, find_adapters, without_adapters
from tessera.ops.loss import token_log_probs
from tessera.parallel.engine import SimpleEngine
from tessera.tasks.dpo import DpoTask
from tessera.training.build import build_processor, build_rows
from tessera.training.run import resume, train
from tessera.training.setup import build_meta_model
from tests.close import assert_within_rounding, move_by_a_rounding, with_moved_weights
from tests.errors import raises
from tests.toys.callbacks import StopAt
from tests.toys.pair_set import pair_recipe, write_pair_set

ANSWER = {"role": "assistant", "content": "I."}
ASK = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Who?"}]
SPELLINGS: dict[str, dict[str, Any]] = {
    "prompt": {"system": "Be kind.", "prompt": "Who?", "chosen": "I.", "rejected": "You."},
    "prompt of messages": {
        "prompt": ASK,
        "chosen": [{"role": "assistant", "content": "I."}],
        "rejected": [{"role": "assistant", "content": "You."}],
    },
    "whole conversations": {
        "chosen": [*ASK, {"role": "assistant", "content": "I."}],
        "rejected": [*ASK, {"role": "assistant", "content": "You."}],
    },
    "whole conversations beside the prompt": {
        "prompt": "Who?",
        "chosen": [*ASK, {"role": "assistant", "content": "I."}],
        "rejected": [*ASK, {"role": "assistant", "content": "You."}],
    },
    "messages": {"messages": ASK, "chosen": {"role": "assistant", "content": "I."}, "rejected": "You."},
    "sharegpt": {
        "system": "Be kind.",
        "conversations": [{"from": "human", "value": "Who?"}],
        "chosen": {"from": "gpt", "value": "I."},
        "rejected": {"from": "gpt", "value": "You."},
    },
    "alpaca": {"system": "Be kind.", "instruction": "Who?", "chosen": "I.", "rejected": "You."},
    "swift": {"messages": [*ASK, {"role": "assistant", "content": "I."}], "rejected_response": "You."},
    "swift with a list": {"messages": [*ASK, {"role": "assistant", "content": "I."}], "rejected_response": ["You."]},
    "swift with messages": {
        "messages": [*ASK, {"role": "assistant", "content": "I."}],
        "rejected_messages": [*ASK, {"role": "assistant", "content": "You."}],
    },
    "swift with a last turn": {
        "messages": [*ASK, {"role": "assistant", "content": "I."}],
        "rejected_messages": [{"role": "assistant", "content": "You."}],
    },
    "swift with a query": {"system": "Be kind.", "query": "Who?", "response": "I.", "rejected_response": "You."},
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_means_the_same(name: str) -> None:
    messages = parse(SPELLINGS[name], "preference", column_map("preference", {}))
    said = [(message.role, message.parts[0].value) for message in messages]
    assert said == [("system", "Be kind."), ("user", "Who?"), ("chosen", "I."), ("rejected", "You.")]


def test_what_was_said_before_a_query_stays_in_front_of_both_answers() -> None:
    row = {
        "query": "Who?",
        "response": "I.",
        "rejected_response": "You.",
        "history": [["Hi", "Ho"]],
        "images": ["a.png"],
    }
    messages = parse(row, "preference", column_map("preference", {}))
    assert [message.role for message in messages] == ["user", "assistant", "user", "chosen", "rejected"]
    assert messages[0].parts[0].kind == "image"


def test_media_and_other_names() -> None:
    row = {
        "conversations": [{"from": "human", "value": "<image> Who?"}],
        "image": "a.png",
        "better": {"from": "gpt", "value": "I."},
        "worse": {"from": "gpt", "value": "You."},
    }
    messages = parse(row, "preference", column_map("preference", {"chosen": "better", "rejected": "worse"}))
    assert [part.kind for part in messages[0].parts] == ["image", "text"]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"prompt": "Who?", "chosen": "I."}, "data.bad-answer rejected"),
        ({"chosen": "I.", "rejected": "You."}, "data.no-question"),
        (
            {**SPELLINGS["swift"], "rejected_messages": [{"role": "assistant", "content": "He."}]},
            "data.several-rejected-answers rejected_response rejected_messages",
        ),
        (
            {**SPELLINGS["alpaca"], "rejected_response": "He."},
            "data.several-rejected-answers rejected rejected_response",
        ),
        (
            {
                "chosen": [*ASK, {"role": "assistant", "content": "I."}],
                "rejected": [ASK[1], {"role": "assistant", "content": "You."}],
            },
            "data.pair-differs-early",
        ),
        ({"messages": ASK, "chosen": {"role": "user", "content": "I."}, "rejected": "You."}, "data.bad-answer"),
        ({"messages": ASK, "rejected_response": "You."}, "data.no-answer"),
        ({"messages": "Who?", "rejected_response": "You."}, "data.no-answer"),
        ({"query": "Who?", "rejected_response": "You."}, "data.no-answer"),
        (
            {"messages": [*ASK, {"role": "assistant", "content": "I."}], "rejected_response": None},
            "data.no-rejected-answer",
        ),
        ({"query": "Who?", "response": "I.", "rejected_response": ["You.", "He."]}, "data.several-rejected-answers 2"),
        ({"query": "Who?", "response": "I.", "rejected_response": 3}, "data.bad-answer rejected"),
        (
            {"query": "Who?", "response": "I.", "rejected_response": "You.", "rejected_images": ["b.png"]},
            "data.rejected-images",
        ),
    ],
)
def test_rows_that_are_no_pairs_are_told(row: dict[str, Any], told: str) -> None:
    with raises(told):
        parse(row, "preference", column_map("preference", {}))


@pytest.mark.parametrize(
    ("format", "beside", "told"),
    [
        ("preference", {"rejected_response": "You."}, "data.no-rejected-answer"),
        ("unpaired_preference", {"label": True}, "data.bad-label"),
    ],
)
def test_a_row_without_its_pair_or_label_is_a_bad_row_among_others_and_a_wrong_set_alone(
    tmp_path: Path, format: RecordFormat, beside: dict[str, Any], told: str
) -> None:
    plain: dict[str, Any] = {"messages": [*ASK, {"role": "assistant", "content": "I."}]}
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in (plain, plain | beside)))
    samples = [one for _, one in open_source(SourceSection(path=path, format=format)).scan(range(2))]
    assert isinstance(samples[0], RecordError)
    assert samples[0].code == told
    assert isinstance(samples[1], Sample)
    path.write_text(json.dumps(plain))
    with raises("data.mixed-formats"):
        open_source(SourceSection(path=path, format=format)).read(0)


@pytest.mark.parametrize(
    ("format", "row", "kind"),
    [
        (
            "preference",
            {"messages": [*ASK, {"role": "assistant", "content": "I."}], "label": True},
            "unpaired_preference",
        ),
        ("preference", {"prompt": "Who?", "completion": "I.", "label": False}, "unpaired_preference"),
        ("preference", {"messages": [*ASK, ANSWER]}, "chat"),
        ("unpaired_preference", {"messages": ASK, "chosen": "I.", "rejected": "You."}, "preference"),
    ],
)
def test_rows_of_another_kind_are_told_the_kind_that_trains_on_them(
    tmp_path: Path, format: RecordFormat, row: dict[str, Any], kind: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(TesseraError) as caught:
        open_source(SourceSection(path=path, format=format)).read(0)
    assert str(caught.value.fix).startswith(f"data.kind={kind} ")


# ---------------------------------------------------------------------------------------------- operation


@pytest.mark.parametrize("chunk", [3, 100])
def test_log_probabilities_and_their_gradients(chunk: int) -> None:
    chance = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=chance).requires_grad_() for shape in ((10, 6), (17, 6)))
    labels = torch.randint(17, (10,), generator=chance)
    labels[3] = IGNORE
    scales = torch.randn(10, generator=chance)
    plain = torch.gather(F.linear(hidden, weight).log_softmax(-1), 1, labels.clamp(min=0)[:, None])[:, 0]
    plain = plain.where(labels != IGNORE, 0.0)
    expected = torch.autograd.grad((plain * scales).sum(), [hidden, weight])
    log_probs = token_log_probs(hidden, weight, labels, chunk=chunk)
    torch.testing.assert_close(log_probs, plain)
    for ours, theirs in zip(torch.autograd.grad((log_probs * scales).sum(), [hidden, weight]), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


# ---------------------------------------------------------------------------------------------- the objective


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair_set(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def batches(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[Batch], Any]:
    config = load_config(pair_recipe(data, tmp_path_factory.mktemp("out")))
    setup = build_meta_model(config, 1)
    processor = build_processor(config, setup)
    rows = build_rows(config, setup, "train", processor)
    return setup, [rows.batch([0]), rows.batch([1, 2])], processor


def test_pairs_lie_side_by_side(data: Path, batches: tuple[Any, list[Batch], Any]) -> None:
    _, microbatches, processor = batches
    rows = {row["id"]: row for row in map(json.loads, (data / "pairs.jsonl").read_text().splitlines())}
    for batch in microbatches:
        pairs = batch["pair_ids"].shape[0]
        assert pairs == batch.counts["pairs"] == len(batch.sample_ids) > 0
        assert set(batch["pair"].tolist()) == {-1, *range(2 * pairs)}
        for number, name in enumerate(batch.sample_ids):
            said = []
            for side in (0, 1):
                labels = batch["labels"][batch["pair"] == 2 * number + side]
                said.append(processor.decode(labels[labels != IGNORE].tolist()).strip())
            assert said == [rows[name]["chosen"]["content"], rows[name]["rejected"]]  # nothing else is compared


def model_with_adapters(setup: Any) -> torch.nn.Module:
    module = setup.spec.main.build(setup.config)
    add_adapters(module, find_adapters(LoraSection(rank=3), module, setup.spec.main.plan(setup.config)))
    chance = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for _, parameter in module.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=chance) * 0.1)
    return module


def plain_log_probs(module: torch.nn.Module, batch: Batch) -> Tensor:
    """[pairs, 2] from whole logits, answer by answer."""
    logits = module(batch, logits=True)["logits"].float().log_softmax(-1)
    log_probs = logits.gather(1, batch["labels"].clamp(min=0)[:, None])[:, 0].where(batch["labels"] != IGNORE, 0.0)
    sides = range(2 * batch["pair_ids"].shape[0])
    return torch.stack([log_probs[batch["pair"] == side].sum() for side in sides]).view(-1, 2)


def plain_loss(module: torch.nn.Module, batch: Batch, beta: float, smoothing: float, free: bool) -> Tensor:
    """As the paper has it, pair by pair."""
    policy = plain_log_probs(module, batch)
    with torch.no_grad(), without_adapters(module):
        reference = torch.zeros_like(policy) if free else plain_log_probs(module, batch)
    total = torch.zeros(())
    for (better, worse), (better_before, worse_before) in zip(policy, reference, strict=True):
        margin = beta * ((better - worse) - (better_before - worse_before))
        total = total - (1 - smoothing) * torch.sigmoid(margin).log() - smoothing * torch.sigmoid(-margin).log()
    return total


@pytest.mark.parametrize(("beta", "smoothing", "free"), [(0.1, 0.0, False), (0.5, 0.2, False), (0.1, 0.0, True)])
def test_loss_and_gradients_are_those_of_the_formula(
    beta: float, smoothing: float, free: bool, batches: tuple[Any, list[Batch], Any]
) -> None:
    setup, microbatches, _ = batches
    module = model_with_adapters(setup)
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    pairs = sum(batch["pair_ids"].shape[0] for batch in microbatches)

    def plain() -> dict[str, Tensor]:
        total = (
            sum((plain_loss(module, batch, beta, smoothing, free) for batch in microbatches), torch.zeros(())) / pairs
        )
        return {"loss": total.detach(), **dict(zip(trained, torch.autograd.grad(total, trained.values()), strict=True))}

    expected = with_moved_weights(module.parameters(), plain)
    out = SimpleEngine(module).step(DpoTask(beta=beta, label_smoothing=smoothing, reference_free=free), microbatches)
    assert float(out.counts["pairs"]) == pairs
    assert float(out.metrics()["margin"]) != 0
    ours = {"loss": out.loss(), **{name: p.grad for name, p in trained.items() if p.grad is not None}}
    # The margin is a small difference of four large sums: a rounding of each is so many of the slope of the loss.
    with torch.no_grad():
        size = max(float(plain_log_probs(module, batch).abs().max()) for batch in microbatches)
    assert_within_rounding(ours, *expected, roundings=1 + 4 * beta * size)


def test_a_new_adapter_begins_at_the_reference(batches: tuple[Any, list[Batch], Any]) -> None:
    setup, (batch, _), _ = batches
    module = model_with_adapters(setup)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "lora_b" in name:
                parameter.zero_()
    out = SimpleEngine(module).step(DpoTask(), [batch])
    assert float(out.loss()) == pytest.approx(0.693147, rel=1e-5)
    assert float(out.metrics()["margin"]) == pytest.approx(0, abs=1e-5)


def test_a_hole_counts_for_nothing(batches: tuple[Any, list[Batch], Any]) -> None:
    setup, (batch, _), _ = batches
    module = model_with_adapters(setup)
    emptied = batch.with_tensors(labels=batch["labels"].where(batch["pair"] != 1, IGNORE))
    out = SimpleEngine(module).step(DpoTask(), [emptied])
    assert float(out.counts["pairs"]) == batch["pair_ids"].shape[0] - 1


# ---------------------------------------------------------------------------------------------- runs


class KeepGradients(Callback):
    """`move`: begins from weights that are one rounding away, which shows how far apart two right results may be."""

    def __init__(self, move: bool = False) -> None:
        self.gradients: dict[str, Tensor] = {}
        self.move = move

    def on_start(self, trainer: Any) -> None:
        if self.move:
            move_by_a_rounding(trainer.module.parameters(), seed=0)

    def on_before_optim(self, trainer: Any) -> None:
        if trainer.step == 1:  # the first step has moved B, so both factors have a gradient
            self.gradients = {n: p.grad.clone() for n, p in trainer.module.named_parameters() if p.grad is not None}


@pytest.mark.slow
def test_any_split_gives_the_same_gradient_and_it_learns(data: Path, tmp_path: Path) -> None:
    records = {}
    for name, micro, steps in (("plain", 1, 2), ("moved", 1, 2), ("twos", 2, 2), ("fours", 4, 20)):
        keep = KeepGradients(move=name == "moved")
        settings = {"train.micro_batch": micro, "train.steps": steps, "optim.lr": 1e-2, "name": name}
        run = train(pair_recipe(data, tmp_path), settings, callbacks=[keep])
        records[name] = keep.gradients
    for name in ("twos", "fours"):
        assert_within_rounding(records[name], records["plain"], records["moved"])
    steps = [row for row in run.metrics if row["kind"] == "train"]
    assert steps[0]["loss"] == pytest.approx(0.6931, abs=1e-3)
    assert steps[-1]["loss"] < 0.5
    assert steps[-1]["accuracy"] > 0.8


def whole_recipe(data: Path, out: Path, **train: Any) -> dict[str, Any]:
    recipe = pair_recipe(data, out, **train)
    recipe["model"].pop("lora")
    return recipe


@pytest.mark.slow
def test_a_whole_model_is_compared_with_a_frozen_copy_of_its_initial_weights(data: Path, tmp_path: Path) -> None:
    """The first loss is log 2, as the model still equals its reference; a resumed run has the same reference."""
    settings = {"optim.lr": 1e-3, "checkpoint.every": 4}
    whole = train(whole_recipe(data, tmp_path / "whole", steps=8), settings)
    rows = [row for row in whole.metrics if row["kind"] == "train"]
    assert rows[0]["loss"] == pytest.approx(0.693147, rel=1e-5)
    assert rows[0]["margin"] == pytest.approx(0, abs=1e-5)
    assert rows[-1]["loss"] < rows[0]["loss"]
    stopped = train(whole_recipe(data, tmp_path / "stopped", steps=8), settings, callbacks=[StopAt(4)])
    resumed = resume(stopped.folder)
    assert [row["loss"] for row in resumed.metrics if row["kind"] == "train"] == [row["loss"] for row in rows]
    assert whole.checkpoint is not None
    assert not any("reference" in name for name in saved_names(whole.checkpoint))


def saved_names(checkpoint: Path) -> set[str]:
    names: set[str] = set()
    for path in checkpoint.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names |= set(file.keys())
    return names


def test_without_a_reference_there_is_no_copy_and_a_pipeline_refuses_one(data: Path, tmp_path: Path) -> None:
    recipe = whole_recipe(data, tmp_path, steps=1)
    assert plan(recipe).memory.frozen.keys() == {"reference"}
    assert "reference     frozen" in plan(recipe).describe()
    assert plan(recipe, {"train.task_options.reference_free": True}).memory.frozen == {}
    with raises("layout.reference-with-pp") as caught:
        plan(recipe, {"parallel.pp": 2}, world=2)
    assert "model.lora" in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"data.kind": "chat", "data.train.0.format": "preference"}, "data.wrong-kind"),
        ({"data.kind": "unpaired_preference"}, "task.data-kind"),
        ({"data.truncate": "turns"}, "data.cannot-truncate"),
        ({"train.task_options.beta": 0}, "recipe.wrong-value"),
        ({"train.task_options.label_smoothing": 0.5}, "recipe.wrong-value label_smoothing"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], error: str, data: Path, tmp_path: Path) -> None:
    with raises(error):
        train(pair_recipe(data, tmp_path, steps=1), settings)


def test_batches_without_pairs_are_refused() -> None:
    with raises("task.no-answer-pairs"):
        DpoTask().counts(Batch({"tokens": torch.zeros(1)}))


def test_the_step_line_shows_what_the_page_promises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(pair_recipe(write_pair_set(tmp_path / "data"), tmp_path / "runs", steps=1))
    line = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("step 1/1"))
    for name in ("margin", "accuracy"):
        assert f"  {name} {run.metrics[0][name]:.3g}  " in line
    assert {"reward_chosen", "reward_rejected"} <= set(run.metrics[0])
    assert len(line) <= 120
