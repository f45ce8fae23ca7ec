"""Keys of other trainers get the right suggestion, from a file and from the shell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import tessera
from tessera.cli.main import main
from tessera.cli.run import complete_key
from tessera.config.reader import _section_at, parse_overrides
from tessera.config.run_config import RunConfig, load_config
from tessera.errors import TesseraError
from tessera_compat.other_trainers import Ours, foreign_keys

RECIPE: dict[str, Any] = {"model": {"family": "qwen2_vl", "preset": "quickstart"}, "train": {"steps": 1}}
CASES = {
    "learning_rate": (1e-5, "`optim: {lr: 1e-05}`, on the command line `optim.lr=1e-05`"),
    "num_train_epochs": (3, "`train: {epochs: 3}`"),
    "per_device_train_batch_size": (2, "train.micro_batch=2"),
    "batch_size": (16, "packed sequences"),
    "gradient_accumulation_steps": (4, "train.global_batch"),
    "bf16": (True, "precision.compute"),
    "cutoff_len": (4096, "data.length=4096"),
    "lora_rank": (8, "`model: {lora: {rank: 8}}`"),
    "freeze_vision_tower": (True, "model.freeze='[vision]'"),
    "model_name_or_path": ("Qwen2-VL", "model.path=Qwen2-VL"),
    "max_grad_norm": (1.0, "optim.clip_norm=1.0"),
    "deepspeed": ("ds.json", "parallel.shard"),
}


@pytest.mark.parametrize(("key", "case"), CASES.items())
def test_a_key_of_another_trainer_is_told_as_ours(key: str, case: tuple[Any, str]) -> None:
    value, said = case
    for recipe, overrides in (({**RECIPE, key: value}, {}), (RECIPE, {key: value}), (RECIPE, {f"train.{key}": value})):
        with pytest.raises(TesseraError) as caught:
            load_config(recipe, overrides)
        assert said in caught.value.what, caught.value.what


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("optim.learning_rte", "(did you mean learning_rate?); the recipe key is optim.lr"),
        ("train.num_train_epoch", "train.epochs"),
        ("lora_alpah", "model.lora.alpha"),
        ("trust_remote_cod", "code of a folder is never run"),
        ("optim.weigth_decay", "(did you mean weight_decay?)"),  # ours is as near as that of others
        ("train.global_batchs", "(did you mean global_batch?)"),  # ours is nearer
    ],
)
def test_a_misspelt_key_of_another_trainer_is_told_as_ours(key: str, said: str) -> None:
    with pytest.raises(TesseraError) as caught:
        load_config(RECIPE, {key: 3})
    assert said in caught.value.what, caught.value.what


def _written(ours: Ours) -> dict[str, Any]:
    return parse_overrides([f"{ours.key}={ours.example}"])


@pytest.mark.parametrize("key", [key for key, ours in foreign_keys().items() if ours.key])
def test_what_is_suggested_exists_and_its_example_is_taken(key: str) -> None:
    ours = foreign_keys()[key]
    *sections, name = ours.key.split(".")
    section = _section_at(RunConfig, sections)
    assert section is not None, ours.key
    assert name in section.model_fields, ours.key
    if ours.example:
        load_config(RECIPE, _written(ours))
        recipe = yaml.safe_load(ours.sentence().split("`")[1])  # as it is to be written into a file
        assert load_config({**RECIPE, **{k: {**RECIPE.get(k, {}), **v} for k, v in recipe.items()}})


def test_no_key_of_ours_is_called_foreign_where_it_stands() -> None:
    assert load_config(RECIPE, {"optim.lr": 1e-4, "train.steps": 3, "train.seed": 2, "optim.weight_decay": 0.1})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "recipe.yaml", "--learning_rate", "1e-5"], "optim.lr=1e-5"),
        (["train", "recipe.yaml", "--num-train-epochs=3"], "train.epochs=3"),
        (["plan", "recipe.yaml", "--bf16"], "precision.compute"),
    ],
)
def test_an_option_of_another_trainer_is_told_as_our_key(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["tessera", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (["q_proj"], "did you mean: text.layers.{*}.attn.q"),
        (["down_proj"], "did you mean: text.layers.{*}.mlp.down"),
        (["qkv"], "did you mean: vision.blocks.{*}.attn.qkv"),
        (["all-linear"], "leave `targets` out"),
        ("all", "leave `targets` out"),
    ],
)
def test_adapter_targets_as_other_tools_name_them_are_told_as_paths(targets: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(TesseraError) as caught:
        tessera.plan({**RECIPE, "model": {**RECIPE["model"], "lora": {"targets": targets}}})
    assert said in str(caught.value)


def test_keys_are_completed_up_to_the_next_dot() -> None:
    assert {"optim.", "train.", "name=", "model."} <= set(complete_key(""))
    assert "optim.lr=" in complete_key("optim.l")
    assert complete_key("model.lora.q") == ["model.lora.quantize="]
    assert complete_key("optim.sch") == ["optim.schedule."]
    assert complete_key("nothing.here") == []


@pytest.mark.parametrize("page", ["coming-from-other-trainers.md", "coming-from-other-trainers.zh.md"])
def test_the_page_on_other_trainers_lists_every_key_beside_ours(page: str) -> None:
    lines = (Path(__file__).parents[2] / "docs" / "how-to" / page).read_text(encoding="utf-8").splitlines()
    for key, ours in foreign_keys().items():
        rows = [line for line in lines if line.startswith("|") and f"`{key}`" in line.split("|")[1]]
        assert len(rows) == 1, key
        assert f"`{ours.key}" in rows[0].split("|")[2] if ours.key else "—" in rows[0], key
