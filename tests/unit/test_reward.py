"""A reward model: its loss and gradients against the formula, runs, and folders that transformers reads."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tessera
from tessera.config.run_config import load_config
from tessera.core.batch import Batch
from tessera.core.outputs import REWARDS
from tessera.errors import TesseraError
from tessera.models.processing.tokenizer import train_tokenizer
from tessera.models.text.reward import as_classifier, classifier_obstacle, is_classifier
from tessera.parallel.engine import SimpleEngine
from tessera.tasks.reward import RewardTask
from tessera.training.build import build_processor, build_rows
from tessera.training.setup import build_meta_model
from tests.close import assert_as_close
from tests.errors import raises
from tests.toys.pair_set import pair_recipe, write_pair_set

CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair_set(tmp_path_factory.mktemp("pairs"))


def recipe(data: Path, out: Path, **train: Any) -> dict[str, Any]:
    rewarded = pair_recipe(data, out, **{"task_options": {"center": 0.1}, **train})
    rewarded["train"]["task"] = "reward"
    return rewarded


def formula(module: torch.nn.Module, batch: Batch, center: float) -> Tensor:
    """As the paper has it, pair by pair."""
    hidden, head = module(batch)["rewards"]
    losses = []
    for number in range(batch["pair_ids"].shape[0]):
        better, worse = (
            (hidden[int((batch["pair"] == 2 * number + side).nonzero()[-1])] * head.weight[0]).sum() for side in (0, 1)
        )
        losses.append(-torch.sigmoid(better - worse).log() + center * (better + worse) ** 2)
    return torch.stack(losses).mean()


def test_loss_and_gradients_are_those_of_the_formula_in_float64(data: Path, tmp_path: Path) -> None:
    config = load_config(recipe(data, tmp_path), {"model.lora": None})
    setup = build_meta_model(config, 1)
    assert setup.spec.gives(REWARDS)
    batch = build_rows(config, setup, "train", build_processor(config, setup)).batch([0, 1])
    assert batch["pair_ids"].shape[0] > 1

    def model(dtype: torch.dtype) -> torch.nn.Module:
        built, chance = setup.spec.main.build(setup.config), torch.Generator().manual_seed(2)
        with torch.no_grad():
            for parameter in built.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=chance) * 0.1)
        return built.to(dtype)

    def plain(dtype: torch.dtype) -> dict[str, Tensor]:
        module = model(dtype)
        floats = {name: t.to(dtype) for name, t in batch.tensors.items() if t.is_floating_point()}
        total = formula(module, batch.with_tensors(**floats), 0.1)
        gradients = torch.autograd.grad(total, list(module.parameters()), allow_unused=True)
        grads = dict(zip(dict(module.named_parameters()), gradients, strict=True))
        return {"loss": total, **{name: grad for name, grad in grads.items() if grad is not None}}

    exact, peer = plain(torch.float64), plain(torch.float32)
    module = model(torch.float32)
    out = SimpleEngine(module).step(RewardTask(center=0.1), [batch])
    ours = {"loss": out.loss(), **{n: p.grad for n, p in module.named_parameters() if p.grad is not None}}
    assert ours.keys() == exact.keys()
    assert "head.weight" in ours
    for key, tensor in ours.items():
        assert_as_close(tensor.float(), peer[key].float(), exact[key], k=4.0, roundings=4.0, what=key)


@pytest.mark.slow
def test_a_vision_language_model_learns_rewards_with_adapters_and_is_asked_for_them(data: Path, tmp_path: Path) -> None:
    trained = recipe(data, tmp_path, steps=10, eval_every=0)
    trained["checkpoint"]["export"] = True
    run = tessera.train(trained, {"optim.lr": 1e-2})
    rows = [row for row in run.metrics if row["kind"] == "train"]
    assert rows[-1]["reward_loss"] < rows[0]["reward_loss"]
    assert rows[-1]["accuracy"] > 0.8
    told = json.loads((run.folder / "adapter" / "adapter_config.json").read_text())
    assert told["task_type"] == "SEQ_CLS"
    assert told["modules_to_save"] == ["score"]
    model, processor = tessera.load(run.folder, device="cpu")
    questions = [json.loads(line) for line in (data / "pairs.jsonl").read_text().splitlines()[:2]]
    talks = [row["messages"] for row in questions]
    with raises("generation.reward-model"):
        model.generate(processor(talks[0], root=data))
    better, worse = (
        [[*row["messages"], {"role": "assistant", "content": side(row)}] for row in questions]
        for side in (lambda row: row["chosen"]["content"], lambda row: row["rejected"])
    )
    rewards = model.reward(processor.whole([*better, *worse], root=data))
    assert all(high > low for high, low in zip(rewards[:2], rewards[2:], strict=True))
    assert rewards[:1] == pytest.approx(model.reward(processor.whole(better[0], root=data)), rel=1e-3)


def text_folder(root: Path) -> Path:
    """Write a small Qwen2 model as transformers keeps it."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen2Config(vocab_size=512, num_key_value_heads=2, tie_word_embeddings=False, **sizes)
    Qwen2ForCausalLM(config).save_pretrained(root)
    train_tokenizer(["Say red blue tall small old."], 512, CHATML).save(str(root / "tokenizer.json"))
    return root


def text_recipe(root: Path) -> dict[str, Any]:
    rows = [{"prompt": f"Say red {n}", "chosen": "red tall", "rejected": "blue old"} for n in range(8)]
    (root / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "out": str(root / "runs"),
        "model": {"path": str(text_folder(root / "base"))},
        "data": {"kind": "preference", "train": str(root / "pairs.jsonl"), "length": 256, "workers": 0},
        "train": {"task": "reward", "steps": 3, "device": "cpu"},
        "optim": {"lr": 1e-3},
        "checkpoint": {"export": True},
    }


ANSWERED = [{"role": "user", "content": "Say red 1"}, {"role": "assistant", "content": "red tall"}]


def reward_of(place: Path, theirs: Any, **options: Any) -> float:
    """Return the reward of an answer, after comparing it with that of a model of transformers."""
    model, processor = tessera.load(place, device="cpu", **options)
    batch = processor.whole(ANSWERED)
    (reward,) = model.reward(batch)
    with torch.no_grad():
        assert reward == pytest.approx(float(theirs(input_ids=batch["tokens"][None]).logits), rel=1e-4, abs=1e-6)
    return reward


@pytest.mark.slow
def test_transformers_reads_the_exported_folder_and_gives_the_same_rewards(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    plain = text_recipe(tmp_path)
    run = tessera.train(plain)
    theirs = AutoModelForSequenceClassification.from_pretrained(run.folder / "hf")
    assert type(theirs).__name__ == "Qwen2ForSequenceClassification"
    converted = tessera.convert(run.folder, tmp_path / "converted")
    first, *others = (reward_of(place, theirs) for place in (run.folder, run.folder / "hf", converted))
    assert others == pytest.approx([first, first], rel=1e-4)
    # A run that begins from a reward model goes on with its head.
    again = tessera.train(plain, {"model.path": str(run.folder / "hf"), "name": "again", "optim.lr": 1e-12})
    assert reward_of(again.folder, theirs) == pytest.approx(first, rel=1e-4)


@pytest.mark.slow
def test_peft_reads_the_exported_adapters_and_head(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForSequenceClassification

    plain = text_recipe(tmp_path)
    run = tessera.train(plain, {"model.lora": {"rank": 4}, "optim.lr": 1e-2})
    resumed = tessera.resume(run.folder, {"train.steps": 4})
    assert resumed.checkpoint != run.checkpoint
    base = AutoModelForSequenceClassification.from_pretrained(plain["model"]["path"], num_labels=1)
    theirs = peft.PeftModel.from_pretrained(base, run.folder / "adapter").eval()
    first = reward_of(run.folder, theirs)
    assert reward_of(run.folder / "adapter", theirs) == pytest.approx(first, rel=1e-4)
    assert reward_of(tessera.convert(run.folder, tmp_path / "merged"), theirs) == pytest.approx(first, rel=1e-3)


def test_what_a_reward_model_cannot_do_is_refused_with_the_reason(data: Path, tmp_path: Path) -> None:
    plain = recipe(data, tmp_path)
    whole = {"model.lora": None, "checkpoint.export": True}
    for changes, said in (
        (whole, "Qwen2VLForConditionalGeneration"),
        ({"parallel.tp": 2}, "task.reward-tp"),
        ({"model.head": "language"}, "reads the output 'rewards'"),
        ({"train.task": "simpo", "train.task_options": {}, "model.head": "reward"}, "reads the output 'logits'"),
        ({"train.task_options": {"centre": 1}}, "centre"),
    ):
        with pytest.raises(TesseraError) as caught:
            build_meta_model(load_config(plain, changes), 2 if "parallel.tp" in changes else 1)
        assert said in str(caught.value)
    with raises("model.no-text-decoder"):
        build_meta_model(
            load_config({"model": {"family": "wan", "preset": "quickstart"}, "train": {"steps": 1, "task": "reward"}}),
            1,
        )


def test_what_a_row_costs_can_be_sent_to_worker_processes(data: Path, tmp_path: Path) -> None:
    spec = build_meta_model(load_config(recipe(data, tmp_path)), 1).spec
    assert spec.gives(REWARDS)
    assert pickle.loads(pickle.dumps(spec.work)).func is spec.work.func  # noqa: S301  # type: ignore[union-attr]


def test_a_classifier_with_more_than_one_class_is_no_reward_model() -> None:
    told = as_classifier({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}, "here")
    assert told["architectures"] == ["Qwen2ForSequenceClassification"]
    assert is_classifier(told)
    assert not is_classifier({"architectures": ["Qwen2ForCausalLM"]})
    assert not is_classifier({})
    with raises("model.several-classes"):
        is_classifier({**told, "num_labels": 3})


@pytest.mark.parametrize("architectures", [5, "LlamaForCausalLM", {"a": 1}, [], None])
def test_a_list_of_classes_that_is_none_names_no_classifier(architectures: object) -> None:
    assert not is_classifier({"architectures": architectures})
    assert classifier_obstacle({"architectures": architectures})
