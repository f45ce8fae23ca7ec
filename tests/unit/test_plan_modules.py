"""`tessera plan --modules` lists the names that keys of a recipe take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tessera
from tessera.cli.main import main
from tessera.config.pattern import matches
from tessera.config.reader import parse_overrides
from tessera.config.run_config import load_config
from tessera.errors import TesseraError
from tessera.parallel.plan_text import modules_text
from tessera.training.setup import build_meta_model
from tests.errors import raises


def test_every_module_with_weights_is_listed_once_by_a_pattern_that_matches_it() -> None:
    recipe = {"model": {"family": "qwen2_vl", "preset": "quickstart"}, "train": {"steps": 1}}
    setup = build_meta_model(load_config(recipe), 1)
    lines = [line.split() for line in modules_text(setup.plan).splitlines()]
    holders = [path for path, module in setup.module.named_modules() if list(module.parameters(recurse=False))]
    for path in holders:
        assert sum(matches(words[0], path) for words in lines) == 1, path
    assert sum(int(words[1]) for words in lines) == len(holders)
    assert ["text.layers.{*}.attn.q", "4", "x", "weight", "[128,", "128],", "bias", "[128]"] in lines


def recipe_with(**model: Any) -> dict[str, Any]:
    return {"model": {"family": "qwen2_vl", "preset": "quickstart", **model}, "train": {"steps": 1}}


def test_names_are_listed_while_a_pattern_is_wrong_and_the_mistake_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_with(lora={"targets": ["text.layer.{*}.attn"]}, freeze=["visoin"])
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    monkeypatch.setattr("sys.argv", ["tessera", "plan", str(tmp_path / "recipe.yaml"), "--modules"])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    assert ended.value.code == 2
    assert "did you mean: text.layers.{*}.attn" in printed.err
    assert "text.layers.{*}.attn.q" in printed.out
    assert "text.layers.{*}.attn.q " in tessera.plan(recipe, patterns=False).modules()


def test_experts_of_a_dense_model_are_told_as_such() -> None:
    with raises("recipe.pattern-matches-nothing"):
        tessera.plan(recipe_with(lora={"targets": ["experts"]}))
    with pytest.raises(TesseraError) as caught:
        tessera.plan(recipe_with(lora={"targets": ["text.layers.{*}.mlp.experts.down_proj"]}))
    assert "this model has no experts" in caught.value.what
    assert caught.value.nearest == "text.layers.{*}.mlp"


@pytest.mark.parametrize(
    ("key", "text", "said"),
    [
        ("model.lora.targets", "text.layers.{*}.attn", 'model.lora.targets=["text.layers.{*}.attn"]'),
        ("model.freeze", "vision", 'model.freeze=["vision"]'),
        ("parallel.compile", "text.layers.{*}", 'parallel.compile=["text.layers.{*}"]'),
    ],
)
def test_a_text_in_place_of_a_list_is_told_as_a_list_of_one(key: str, text: str, said: str) -> None:
    with raises("recipe.wrong-value", said):
        load_config(recipe_with(), {key: text})
    assert load_config(recipe_with(), parse_overrides([said]))
