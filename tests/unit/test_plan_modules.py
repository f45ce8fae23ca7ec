"""`tessera plan --modules` lists the names that keys of a recipe take."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

import tessera
from tessera.cli.main import main
from tessera.config.pattern import matches
from tessera.config.reader import _section_at, keys_of, parse_overrides
from tessera.config.recipe_patterns import patterns_of
from tessera.config.run_config import RunConfig, load_config
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


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            {"lora": {"targets": ["text.layers.{0-7}.attn"]}},
            "targets: text.layers.{0-7}.attn also lists 4-7",
        ),
        ({"freeze": ["{text,visoin}.{layers,blocks}.{1,3,9}"]}, "also lists visoin, blocks, 9"),
        ({"lora": {"targets": [{"modules": "text.layers.{2-5}.mlp", "rank": 2}]}}, "also lists 4-5"),
    ],
)
def test_a_plan_tells_what_a_pattern_lists_and_the_model_has_not(model: dict[str, Any], said: str) -> None:
    assert said in tessera.plan(recipe_with(**model)).describe()


def test_patterns_that_match_all_they_list_are_not_mentioned() -> None:
    lora = {"targets": ["text.layers.{0-3}.{attn,mlp}", "vision.blocks.{*}"]}
    assert "also lists" not in tessera.plan(recipe_with(lora=lora)).describe()


def test_every_key_that_holds_patterns_is_among_them() -> None:
    described = [key for key in keys_of(RunConfig) if "pattern" in _description(key)]
    listed = inspect.getsource(patterns_of)
    assert len(described) > 8
    assert [key for key in described if f'"{key}"' not in listed] == []


def _description(key: str) -> str:
    *sections, name = key.split(".")
    section = _section_at(RunConfig, sections)
    assert section is not None
    return section.model_fields[name].description or ""


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
        ("model.freeze", "vision", "model.freeze=[vision]"),
        ("parallel.compile", "text.layers.{*}", 'parallel.compile=["text.layers.{*}"]'),
    ],
)
def test_a_text_in_place_of_a_list_is_told_as_a_list_of_one(key: str, text: str, said: str) -> None:
    with raises("recipe.wrong-value", said):
        load_config(recipe_with(), {key: text})
    assert load_config(recipe_with(), parse_overrides([said]))
