from __future__ import annotations

import json
import time
from pathlib import Path
from typing import ClassVar

import pytest

from tessera.config.reader import Section, build, dump_yaml, parse_overrides, parse_yaml, read_mapping, schema
from tessera.config.run_config import RunConfig, load_config
from tessera.config.saved_recipe import read_saved
from tessera.errors import TesseraError
from tests.errors import raises

BASE = {"model": {"family": "qwen2_vl"}, "train": {"steps": 3}}


def test_misspelt_key_names_file_key_and_nearest(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("model: {family: qwen2_vl}\ntrain: {steps: 3}\noptim: {weight_deccay: 0.1}\n")
    with pytest.raises(TesseraError) as caught:
        load_config(path)
    assert "optim.weight_deccay" in str(caught.value)
    assert caught.value.nearest == "optim.weight_decay"
    assert str(path) in str(caught.value)


def test_misspelt_key_inside_a_list() -> None:
    with pytest.raises(TesseraError) as caught:
        load_config(BASE, {"optim": {"groups": [{"patern": "x"}]}})
    assert "pattern" in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        ({"train.steps": "many"}, "recipe.wrong-value train.steps"),
        ({"optim.lr": -1}, "recipe.wrong-value optim.lr"),
        ({"train.global_batch": 3, "train.micro_batch": 2}, "recipe.wrong-value"),
        ({"parallel.shard": 0}, "recipe.wrong-value"),
        ({"precision.weights": "float8"}, "recipe.wrong-value precision.weights"),
        ({"train.steps.more": 1}, "recipe.not-a-section"),
        ({"name": "../elsewhere"}, "recipe.wrong-value"),
    ],
)
def test_wrong_values_are_named(overrides: dict[str, object], error: str) -> None:
    with raises(error):
        load_config(BASE, overrides)


def test_adapters_learn_faster_by_default_and_a_saved_rate_stays() -> None:
    adapted = load_config(BASE, {"model.lora": {}})
    assert (load_config(BASE).optim.lr, adapted.optim.lr) == (1e-5, 1e-4)
    assert load_config(BASE, {"model.lora": {}, "optim.lr": 2e-5, "optim.weight_decay": 0.1}).optim.lr == 2e-5
    assert load_config(BASE, {"model.lora": {}, "optim.weight_decay": 0.1}).optim.lr == 1e-4
    saved = parse_yaml(dump_yaml(adapted), "config.yaml")
    assert saved["optim"]["lr"] == 1e-4
    saved["optim"]["lr"] = 1e-5  # as an earlier version has written it
    assert load_config(saved).optim.lr == 1e-5


def test_all_problems_are_listed_at_once() -> None:
    with pytest.raises(TesseraError) as caught:
        load_config(BASE, {"optm.lr": 1, "train.steps": 0, "data.length": "long"})
    assert all(word in str(caught.value) for word in ("optm", "train.steps", "data.length"))


def test_a_recipe_of_nothing_but_unknown_keys_is_refused_briefly() -> None:
    with raises("recipe.several-problems", "20000 problems", "key9", "19990 more") as raised:
        load_config({**BASE, **{f"key{number}": 1 for number in range(20_000)}})
    assert "key10" not in str(raised.value)
    with raises("recipe.unknown-key") as raised:
        load_config({**BASE, "k" * 100_000: 1})
    assert len(str(raised.value)) < 2000


def test_numbers_like_1e_5_are_numbers() -> None:
    assert parse_yaml("{a: 1e-5, b: 1.5E3, c: -2e+4, d: 1e5x}", "t") == {"a": 1e-5, "b": 1500.0, "c": -2e4, "d": "1e5x"}
    assert parse_overrides(["optim.lr=1e-4", "data.pack=false", "x=[1, 2]", "y="]) == {
        "optim.lr": 1e-4,
        "data.pack": False,
        "x": [1, 2],
        "y": None,
    }


def test_override_reaches_into_lists() -> None:
    base = {**BASE, "data": {"train": [{"path": "a.json"}]}}
    assert load_config(base, {"data.train.0.path": "b.json"}).data.train[0].path == Path("b.json")
    with raises("recipe.no-list-entry"):
        load_config(base, {"data.train.4.path": "b.json"})


@pytest.mark.parametrize("word", ["optim.lr", "=3", "a b=1"])
def test_an_override_without_sense_is_refused(word: str) -> None:
    with raises("recipe.not-an-override"):
        parse_overrides([word])


def test_missing_file_suggests_a_neighbour(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("{}")
    with pytest.raises(TesseraError) as caught:
        read_mapping(tmp_path / "recipi.yaml")
    assert caught.value.nearest == "recipe.yaml"


@pytest.mark.parametrize(
    "text",
    [
        "a: !!python/object/apply:os.system ['true']",
        "a: &x [1]\nb: *x",
        "a: 1\na: 2",
        "a: [1, 2",
        "? [1, 2]\n: 3",
        "[" * 5000 + "]" * 5000,
    ],
)
def test_dangerous_or_ambiguous_yaml_is_refused_quickly(text: str) -> None:
    started = time.process_time()  # a busy machine takes longer, and works no more
    with pytest.raises(TesseraError):
        parse_yaml(text, "t")
    assert time.process_time() - started < 5


def test_resolved_copy_reads_back_the_same(tmp_path: Path) -> None:
    config = load_config(BASE, {"optim.lr": 3e-4, "data.train": [{"path": "x.json"}]})
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    assert load_config(tmp_path / "config.yaml") == config


def test_schema_describes_every_section() -> None:
    assert {"model", "data", "parallel", "train", "optim", "checkpoint", "log"} <= set(schema(RunConfig)["properties"])


def test_a_renamed_key_names_the_new_one() -> None:
    class Inner(Section):
        renamed: ClassVar[dict[str, str]] = {"swap": "inner.activation_offload"}
        activation_offload: bool = False

    class Outer(Section):
        inner: Inner = Inner()

    with raises("recipe.renamed-key", "inner.swap", "inner.activation_offload"):
        build(Outer, {"inner": {"swap": True}}, "recipe.yaml")


@pytest.mark.parametrize(
    ("settings", "error", "allowed"),
    [
        ({"train.ema": 0.9}, "recipe.not-a-section train.ema", "decay"),
        ({"train.ema": True}, "recipe.not-a-section train.ema={}", "decay"),
        ({"model.lora": "nf4"}, "recipe.not-a-section model.lora", "quantize"),
        ({"optim": [1]}, "recipe.not-a-section", "lr"),
    ],
)
def test_a_value_in_place_of_a_section_lists_the_keys_of_the_section(
    settings: dict[str, object], error: str, allowed: str
) -> None:
    with raises(error) as caught:
        load_config({"model": {"family": "qwen2_vl"}, "train": {"steps": 1}}, settings)
    assert allowed in (caught.value.allowed or [])


def test_a_word_that_is_no_choice_is_told_all_of_them_once() -> None:
    with pytest.raises(TesseraError) as caught:
        load_config(BASE, {"precision.compute": "bf16"})
    assert caught.value.what == "precision.compute: must be 'float32', 'bfloat16', 'float16' or 'auto', got 'bf16'"
    assert caught.value.nearest == "bfloat16"


def test_patterns_of_a_removed_key_of_a_saved_run_are_read_in_the_key_of_today(tmp_path: Path) -> None:
    with pytest.raises(TesseraError) as caught:
        load_config(BASE, {"parallel.recompute_norm": ["text.layers.{*}"]})
    assert caught.value.code == "recipe.renamed-key"
    saved = tmp_path / "config.yaml"
    saved.write_text(json.dumps({**BASE, "parallel": {"recompute": ["a"], "recompute_norm": ["b"]}}))
    assert read_saved(saved)["parallel"] == {"recompute": ["a", {"modules": "b", "keep": "matmul"}]}
